"""A submitted batch: the handle to wait on, its prompts and its attempts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, InvalidStateError, wait
from pathlib import Path
from typing import Any

import attrs

from rlskip.dispatch.journal import SessionJournal
from rlskip.dispatch.scheduler import SessionGroup, Unit
from rlskip.dispatch.timeline import Span, write_picture, write_trace
from rlskip.dispatch.units import Sample
from rlskip.keys import (
    ERROR,
    EXPECTED_ROLLOUTS,
    FAILURE,
    FINISHED,
    PENDING,
    STATUS,
    SessionKey,
    prompt_tag,
    session_tag,
    status_tag,
)


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
    error: str | None = None
    running: bool = False

    def fail(self, session: int, cause: str) -> None:
        """Note that a session failed for good."""
        self.batch.failed[self.uid, session] = cause
        self.error = self.error or f"session {session}: {cause}"

    def root_tag(self) -> dict[str, Any]:
        """The tag of its key at the start: a number to count markers to, or a legacy status."""
        if self.batch.counted:
            return {**prompt_tag(self.batch.step, self.n), EXPECTED_ROLLOUTS: self.n}
        return status_tag(self.batch.step, PENDING, expected=self.n)

    def last_tags(
        self, session: int, attempt: int, error: str | None, rows: int | None
    ) -> dict[str, dict[str, Any]]:
        """A session's marker and, after the last of a prompt that is not counted, its status."""
        tags = {str(SessionKey(self.uid, session)): session_tag(session, attempt, error, rows)}
        if not self.open and not self.batch.counted:
            failed = {STATUS: FAILURE, ERROR: self.error}
            tags[self.uid] = {STATUS: FINISHED} if self.error is None else failed
        return tags


@attrs.define(eq=False)
class Attempt:
    """A started attempt; `closed` once its outcome is decided, though it may still run."""

    worker: int
    unit: Unit
    started: float
    future: asyncio.Future[Any]
    closed: bool = False

    @property
    def prompt(self) -> Prompt:
        return self.unit.group  # type: ignore[return-value]

    def __str__(self) -> str:
        session, attempt = self.unit.session, self.unit.attempt
        return f"session {session} of {self.prompt.uid} (attempt {attempt}, worker {self.worker})"


class BatchHandle:
    """A submitted batch. Wait for it with :meth:`result`, or await it."""

    def __init__(self, step: int, partition: str, validate: bool, counted: bool) -> None:
        self.step = step
        self.partition = partition
        self.validate = validate
        self.counted = counted  # whether the root tags hold a number of markers to count
        self.prompts: list[Prompt] = []
        self.running: set[Attempt] = set()
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
