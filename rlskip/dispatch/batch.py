"""A submitted batch: the handle to wait on, its prompts and its attempts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, InvalidStateError, wait
from pathlib import Path
from typing import Any

import attrs

from rlskip.dispatch.coroutines import Answer
from rlskip.dispatch.failures import InfrastructureFailure
from rlskip.dispatch.journal import SessionJournal
from rlskip.dispatch.scheduler import SessionGroup, Unit
from rlskip.dispatch.timeline import Span, write_picture, write_trace
from rlskip.dispatch.units import Sample
from rlskip.keys import (
    EXPECTED_ROLLOUTS,
    prompt_tag,
)

logger = logging.getLogger(__name__)


@attrs.frozen
class BatchReport:
    """The outcome of a batch.

    Parameters
    ----------
    step, partition
        Name the batch.
    prompts, sessions
        Their numbers.
    resumed
        Sessions taken from the journal.
    succeeded
        Sessions that succeeded, including resumed ones.
    failed
        ``(uid, session id)`` of each failed session to its cause.
    attempts
        The number of attempts at sessions.
    late
        Results that arrived after their attempt was given up, and were dropped.
    tokens
        Tokens generated.
    seconds
        From the call to the last marker.
    """

    step: int
    partition: str
    prompts: int
    sessions: int
    resumed: int
    succeeded: int
    failed: Mapping[tuple[str, int], str]
    attempts: int
    late: int
    tokens: int
    seconds: float


@attrs.define(eq=False, kw_only=True)
class Prompt(SessionGroup):
    """One prompt of a submitted batch.

    ``open`` holds the sessions that have not finished; ``failures`` counts failed attempts by
    ``(session, whether the infrastructure failed)``.
    """

    batch: BatchHandle
    uid: str
    sample: Sample
    sampling: Mapping[str, Any]
    info: Mapping[str, Any]
    known_as: str | None = None
    journal_key: tuple[str, int] | None = None
    open: set[int] = attrs.field(factory=set)
    failures: Counter[tuple[int, bool]] = attrs.field(factory=Counter)

    def root_tag(self) -> dict[str, Any]:
        """The tag of its key: the number of markers to count to."""
        return {**prompt_tag(self.batch.step, self.n), EXPECTED_ROLLOUTS: self.n}


@attrs.define(eq=False)
class Attempt:
    """A started attempt at a session, and what its coroutine waits for."""

    worker: int
    unit: Unit
    started: float
    outcome: Answer[Any] = attrs.field(factory=Answer)

    @property
    def prompt(self) -> Prompt:
        return self.unit.group  # type: ignore[return-value]

    def returned(self, future: asyncio.Future[Any]) -> None:
        """Its worker has returned or raised, perhaps after the attempt was given up."""
        error = InfrastructureFailure("cancelled") if future.cancelled() else future.exception()
        if not self.outcome.done:
            if error is None:
                self.outcome.set(future.result())
            else:
                self.outcome.fail(error)
        elif error is None:
            self.prompt.batch.late += 1
            logger.info("dropped a late result of %s", self)

    def __str__(self) -> str:
        session, attempt = self.unit.session, self.unit.attempt
        return f"session {session} of {self.prompt.uid} (attempt {attempt}, worker {self.worker})"


class BatchHandle:
    """A submitted batch. Wait for it with :meth:`result`, or await it."""

    def __init__(self, step: int, partition: str, validate: bool) -> None:
        self.step = step
        self.partition = partition
        self.validate = validate
        self.prompts: list[Prompt] = []
        self.waiting: dict[Answer[Any], None] = {}  # what its unfinished sessions wait for
        self.marked: Answer[None] = Answer()  # set with the last marker
        self.journal: SessionJournal | None = None
        self.spans: list[Span] | None = None
        self.progress: Progress | None = None
        self.began = time.perf_counter()
        self.seconds: float | None = None
        self.sessions = self.unwritten = self.resumed = self.attempts = 0
        self.late = self.tokens = 0
        self.failed: dict[tuple[str, int], str] = {}
        self.queued: dict[tuple[str, int], float] = {}
        self._future: Future[BatchReport] = Future()
        # A caller that stops waiting must not cancel the future for the others.
        self._future.set_running_or_notify_cancel()
        self.cancelled = self.rooted = False
        self.on_cancel: Callable[[], object] = lambda: None

    def result(self, timeout: float | None = None) -> BatchReport:
        """Wait until every session has its marker.

        Raises
        ------
        TimeoutError
            After `timeout` seconds. The batch goes on.
        Exception
            What kept the batch from being written to the queue.
        """
        # Future.result() raises a class of its own before Python 3.11.
        if not wait([self._future], timeout).done:
            unwritten = f"{self.unwritten} of {self.sessions} sessions"
            raise TimeoutError(f"step {self.step}: {unwritten} have no marker after {timeout:g} s")
        return self._future.result()

    def __await__(self) -> Generator[Any, None, BatchReport]:
        return asyncio.wrap_future(self._future).__await__()

    def done(self) -> bool:
        """Whether every session has its marker."""
        return self._future.done()

    def cancel(self) -> None:
        """Stop its sessions. Each one without a marker gets one with status failure."""
        self.on_cancel()

    # -- for the dispatcher ----------------------------------------------------------------

    def elapsed(self) -> float:
        """Seconds since the batch was submitted."""
        return time.perf_counter() - self.began

    def note(self, attempt: Attempt, tokens: int, error: str | None) -> None:
        """Add an attempt that has ended to the timeline, where one is drawn."""
        if self.spans is None:
            return
        prompt, unit = attempt.prompt, attempt.unit
        span = Span(
            worker=attempt.worker,
            prompt=prompt.prompt,
            uid=prompt.uid,
            session=unit.session,
            attempt=unit.attempt,
            queued=self.queued[prompt.uid, unit.session],
            started=attempt.started,
            ended=self.elapsed(),
            tokens=tokens,
            error=error,
        )
        self.spans.append(span)

    def finish(self, error: BaseException | None = None) -> None:
        """Wake the callers that wait, with the report or with `error`; any thread may."""
        with contextlib.suppress(InvalidStateError):  # it has finished before
            if error is None:
                self._future.set_result(self.report())
            else:
                self._future.set_exception(error)

    def report(self) -> BatchReport:
        """The outcome so far."""
        return BatchReport(
            step=self.step,
            partition=self.partition,
            prompts=len(self.prompts),
            sessions=self.sessions,
            resumed=self.resumed,
            succeeded=self.sessions - self.unwritten - len(self.failed),
            failed=dict(self.failed),
            attempts=self.attempts,
            late=self.late,
            tokens=self.tokens,
            seconds=self.elapsed() if self.seconds is None else self.seconds,
        )

    def write_timeline(self, directory: str) -> None:
        """Write ``{partition}-{step}.json`` and ``.png``; there must be spans."""
        assert self.spans
        folder = Path(directory).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        write_trace(self.spans, folder / f"{self.partition}-{self.step}.json")
        title = f"step {self.step} ({self.partition}): {self.sessions} sessions"
        write_picture(self.spans, folder / f"{self.partition}-{self.step}.png", title)


class Progress:
    """A progress bar: sessions finished, tokens per second, time left. Needs tqdm."""

    def __init__(self, step: int, sessions: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=sessions, desc=f"step {step}", unit="session", leave=False)
        self._began = time.perf_counter()
        self._tokens = self._failed = 0

    def update(self, tokens: int, failed: bool) -> None:
        self._tokens += tokens
        self._failed += failed
        rate = self._tokens / max(time.perf_counter() - self._began, 1e-9)
        failures = {"failed": self._failed} if self._failed else {}
        with contextlib.suppress(Exception):  # the terminal may be gone
            self._bar.set_postfix({"tok/s": f"{rate:,.0f}", **failures}, refresh=False)
            self._bar.update()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._bar.close()
