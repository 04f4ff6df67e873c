"""A batch: read from the trainer's, its prompts and their groups, and the handle to wait on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from typing import Any

import attrs
import xxhash
from tensordict import TensorDictBase

from rlskip.batch.columns import own, rows_of
from rlskip.batch.meta import plain
from rlskip.config.dispatch import DispatchConfig
from rlskip.dispatch.history import History
from rlskip.dispatch.journal import SessionJournal
from rlskip.dispatch.scheduler import SessionGroup
from rlskip.dispatch.units import BatchError, Sample, build_trajectory_info, step_number, whole
from rlskip.format.dump_errors import UnsupportedTypeError
from rlskip.format.fingerprint import fingerprint
from rlskip.format.prompt_digests import digests_of
from rlskip.jobs.enclosing import enclosing
from rlskip.jobs.served import Needs, needs
from rlskip.keys import DO_SAMPLE, EXPECTED_ROLLOUTS, ROLLOUT_N, TRAIN, VAL, prompt_tag
from rlskip.queue import PromptOutcome
from rlskip.store.comparable import canonical

GREEDY = {"temperature": 0, "top_p": 1.0, "top_k": -1}
"""Sampling parameters of a training prompt whose ``__do_sample__`` is false."""


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


@attrs.define(eq=False)
class Group:
    """What the sessions of a prompt left.

    Attributes
    ----------
    uid, step, n
        The prompt, its step, and its number of sessions.
    rows
        The rows of each session that succeeded, by session; none if they are in a queue.
    failed
        Why each other session failed.
    """

    uid: str
    step: int
    n: int
    rows: dict[int, list[dict[str, Any]]] = attrs.field(factory=dict)
    failed: dict[int, str] = attrs.field(factory=dict)

    def outcome(self) -> PromptOutcome:
        """How errors and messages name it."""
        succeeded, failed = tuple(sorted(self.rows)), tuple(sorted(self.failed.items()))
        return PromptOutcome(self.uid, self.step, None, self.n, succeeded, failed)


@attrs.define(eq=False, kw_only=True)
class Prompt(SessionGroup):
    """One prompt of a submitted batch; ``open`` holds the sessions that have no outcome yet."""

    batch: BatchHandle
    uid: str
    sample: Sample
    sampling: Mapping[str, Any]
    info: Mapping[str, Any]
    known_as: str | None = None
    content: str | None = None
    journal_key: tuple[str, int] | None = None
    open: set[int]  # from the start, so that whatever fails, each session has an outcome
    group: Group

    @property
    def running(self) -> bool:
        """Whether its group lacks a session, which may still be written."""
        return len(self.group.rows) + len(self.group.failed) < self.n

    def root_tag(self) -> dict[str, Any]:
        """The tag of its key: the number of markers to count to."""
        return {**prompt_tag(self.batch.step, self.n), EXPECTED_ROLLOUTS: self.n}


class BatchHandle:
    """A submitted batch. Wait for it with :meth:`result`, or await it."""

    # A session is in `prompt.open` until it has an outcome, and counts in `unwritten` until that is
    # in its group: at 0 nothing is written any more. Sessions await what `waiting` holds.

    def __init__(self, step: int, partition: str, validate: bool, sinks: bool) -> None:
        self.step = step
        self.partition = partition
        self.validate = validate
        self.sinks = sinks  # whether rows and markers go to the dispatcher's queue
        self.own = False  # whether only the call that submitted it takes its groups
        self.prompts: list[Prompt] = []
        self.waiting: dict[asyncio.Future[Any], None] = {}
        self.marked: asyncio.Future[None] | None = None  # set with the last session
        self.journal: SessionJournal | None = None
        self.needs = needs.get(Needs())  # of the stage that submits it
        self.unjournaled = ""  # why some of its prompts cannot be journaled
        self.began = time.perf_counter()
        self.seconds: float | None = None
        self.sessions = self.unwritten = self.resumed = self.attempts = 0
        self.late = self.tokens = 0
        self.failed: dict[tuple[str, int], str] = {}
        self.settled = threading.Event()  # set while nothing is written for it
        self.settled.set()
        self._future: Future[BatchReport] = Future()
        # A caller that stops waiting must not cancel the future for the others.
        self._future.set_running_or_notify_cancel()
        self.cancelled = False
        self.rooted = threading.Event()  # set once its roots are in the queue, or it has ended
        self.on_cancel: Callable[[], object] = lambda: None
        self.on_ended: Callable[[Prompt], object] = lambda prompt: None
        self.on_taken: Callable[[], object] = lambda: None
        self.on_finished: Callable[[BaseException | None], object] = lambda error: None

    def groups(self, timeout: float | None = None) -> list[Group]:
        """Wait as :meth:`result` does, and take the groups: ``collect()`` has them no more.

        Their rows are in the queue, if the dispatcher has one.
        """
        self.result(timeout)
        self.on_taken()
        return [prompt.group for prompt in self.prompts]

    def result(self, timeout: float | None = None) -> BatchReport:
        """Wait until every session has an outcome and, with a queue, its marker.

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
            raise TimeoutError(f"step {self.step}: {unwritten} have not ended after {timeout:g} s")
        return self._future.result()

    def __await__(self) -> Generator[Any, None, BatchReport]:
        return asyncio.wrap_future(self._future).__await__()

    def done(self) -> bool:
        """Whether :meth:`result` returns at once."""
        return self._future.done()

    def cancel(self) -> None:
        """Stop its sessions: each one without an outcome fails, and ``collect()`` has none."""
        self.on_taken()
        self.on_cancel()

    # -- for the dispatcher ----------------------------------------------------------------

    def elapsed(self) -> float:
        """Seconds since the batch was submitted."""
        return time.perf_counter() - self.began

    def finish(self, error: BaseException | None = None) -> None:
        """Wake the callers that wait, with the report or with `error`; any thread may."""
        with contextlib.suppress(InvalidStateError):  # it has finished before
            if error is None:
                self._future.set_result(self.report())
            else:
                self._future.set_exception(error)
            self.on_finished(error)
        self.rooted.set()

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


def read_batch(
    prompts: TensorDictBase | Sequence[Mapping[str, Any]],
    config: DispatchConfig,
    history: History | None,
    journaled: bool,
    step: int | None,
    validate: bool | None,
    partition: str | None,
    sinks: bool,
) -> BatchHandle:
    """Read what ``RolloutDispatcher.submit`` takes; raises :class:`BatchError`.

    `journaled`: whether journals need the contents of training prompts; `sinks`: whether its rows
    go to the queue.
    """
    if isinstance(prompts, TensorDictBase) and prompts.batch_dims != 1:
        raise BatchError(f"batch size {tuple(prompts.batch_size)}", remedy="expected (prompts,)")
    samples = [own(row) for row in rows_of(prompts)]
    if not samples:
        remedy = "pass a TensorDict of batch size (prompts,), or a list of one mapping per prompt"
        raise BatchError("the batch has no prompts", remedy=remedy)
    first = samples[0]
    step = step_number(first.get("global_steps") if step is None else step)
    validate = bool(first.get("validate", False)) if validate is None else validate
    index = [sample.get("index", i) for i, sample in enumerate(samples)]
    infos = build_trajectory_info(step, index, validate)
    partition = partition or (VAL if validate else TRAIN)
    batch = BatchHandle(step, partition, validate, sinks)
    usual = dict((config.val_sampling if validate else config.sampling) or {})
    greedy = {**usual, **GREEDY}
    for i, (sample, info) in enumerate(zip(samples, infos, strict=True)):
        sample.pop("validate", None)
        own_n = sample.pop(ROLLOUT_N, None)
        n = (config.val_n if validate else config.n) if own_n is None else whole(own_n)
        sampled = bool(sample.pop(DO_SAMPLE, True)) or validate
        if n is None or n < 1:
            raise BatchError(f"{own_n!r} sessions for prompt {i}", ROLLOUT_N, "set at least one")
        uid = str(plain(sample.get("uid", "")))
        if not uid:
            raise BatchError("the batch has no uids", "uid", "add a field that names each prompt")
        prompt = Prompt(
            prompt=i,
            prompts=len(samples),
            n=n,
            batch=batch,
            uid=uid,
            open=set(range(n)),
            group=Group(uid, step, n),
            sample=Sample(sample),
            sampling=usual if sampled else greedy,
            info=info,
        )
        if history is not None:
            prompt.known_as = history.key(sample)
            prompt.expected = history.expected(prompt.known_as)
        if journaled and not validate:
            try:
                prompt.content = _content_of(sample, sampled)
            except UnsupportedTypeError as error:
                batch.unjournaled = f"{error.where}: {error.what}"
        batch.prompts.append(prompt)
    twice = [uid for uid, count in Counter(p.uid for p in batch.prompts).items() if count > 1]
    if twice:
        raise BatchError(f"duplicate uids: {', '.join(twice[:10])}", "uid")
    batch.sessions = batch.unwritten = sum(p.n for p in batch.prompts)
    return batch


def _content_of(sample: Mapping[str, Any], sampled: bool) -> str:
    """What journals know a prompt by, among those of the enclosing call of a stage.

    Its uid and the like count if it has no other field.
    """
    (digest,) = digests_of([sample])
    if digest is None:
        digest = fingerprint(sample, volatile=())
    calls = {role: name for role, name in enclosing.get({}).items() if name}
    made = canonical({**calls, DO_SAMPLE: sampled})
    return xxhash.xxh3_128_hexdigest(f"{digest} {made}".encode())
