"""A batch: its prompts and their groups, the handle to wait on, and the prompts that are held."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, InvalidStateError, wait
from typing import Any

import attrs

from rlskip.config.replay import ReplayConfig
from rlskip.dispatch.journal import SessionJournal
from rlskip.dispatch.scheduler import SessionGroup
from rlskip.dispatch.sessions import BatchError
from rlskip.jobs.served import Needs, needs
from rlskip.keys import EXPECTED_ROLLOUTS, prompt_tag, uid_of
from rlskip.queue import PromptOutcome
from rlskip.queue.partition import Partition
from rlskip.queue.readiness import State


@attrs.frozen
class BatchReport:
    """The outcome of a batch, in numbers of its prompts and sessions.

    `resumed` sessions were taken from the journal, and count as succeeded; `failed` has the cause
    of each other one by uid and session id. `seconds` are those from the call to the last marker.
    """

    step: int
    partition: str
    prompts: int
    sessions: int
    resumed: int
    succeeded: int
    failed: Mapping[tuple[str, int], str]
    attempts: int
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
    number: int | None = attrs.field(default=None, repr=False)  # that its partition gives it

    @property
    def running(self) -> bool:
        """Whether it lacks a session, which may still be written."""
        return len(self.rows) + len(self.failed) < self.n

    def outcome(self) -> PromptOutcome:
        """How errors and messages name it."""
        succeeded, failed = tuple(sorted(self.rows)), tuple(sorted(self.failed.items()))
        return PromptOutcome(self.uid, self.step, None, self.n, succeeded, failed)

    def state(self, viable: int | None) -> State:
        """The state for who samples; `viable` is that of :meth:`PromptOutcome.accepted`."""
        if self.running:
            return State.RUNNING
        return State.COMPLETE if self.outcome().accepted(viable) else State.INCOMPLETE


@attrs.define(eq=False, kw_only=True)
class Prompt(SessionGroup):
    """One prompt of a submitted batch; ``open`` holds the sessions that have no outcome yet."""

    batch: BatchHandle
    uid: str
    fields: Mapping[str, Any]  # taken from the batch once, for all its sessions
    sampling: Mapping[str, Any]
    sampled: bool  # or greedy
    info: Mapping[str, Any]
    known_as: str | None = None
    content: str | None = None
    journal_key: tuple[str, int] | None = None
    open: set[int]  # from the start, so that whatever fails, each session has an outcome
    group: Group
    id: int = attrs.field(factory=itertools.count().__next__, init=False)

    def root_tag(self) -> dict[str, Any]:
        """The tag of its key: the number of markers to count to."""
        return {**prompt_tag(self.batch.step, self.n), EXPECTED_ROLLOUTS: self.n}


class BatchHandle:
    """A submitted batch. Wait for it with :meth:`result`, or await it."""

    # A session is in `prompt.open` until it has an outcome, and counts in `unwritten` until that is
    # in its group: at 0 nothing is written any more, and the batch has finished.

    def __init__(self, step: int, partition: str, validate: bool, held: Held) -> None:
        self.step = step
        self.partition = partition
        self.validate = validate
        # Where calls find its groups: those that any call takes, or those of one call. None: rows
        # and markers go to the dispatcher's queue.
        self.within: Partition | None = None
        self.prompts: list[Prompt] = []
        self.running: dict[Any, None] = {}  # its attempts
        self.journal: SessionJournal | None = None
        self.needs = needs.get(Needs())  # of the stage that submits it
        self.unjournaled = ""  # why some of its prompts cannot be journaled
        self.began = time.perf_counter()
        self.seconds: float | None = None
        self.sessions = self.unwritten = self.resumed = self.attempts = self.tokens = 0
        self.failed: dict[tuple[str, int], str] = {}
        self.error: BaseException | None = None  # why it was given up
        self.stopped = ""  # why its sessions that have no outcome fail
        self.rooted = threading.Event()  # set once its roots are in the queue, or cannot be
        self.on_cancel: Callable[[], object] = lambda: None
        self._held = held
        self._future: Future[BatchReport] = Future()
        # A caller that stops waiting must not cancel the future for the others.
        self._future.set_running_or_notify_cancel()

    def groups(self, timeout: float | None = None) -> list[Group]:
        """Wait as :meth:`result` does, and take the groups: ``collect()`` has them no more.

        Their rows are in the queue, if the dispatcher has one.
        """
        self.result(timeout)
        groups = self.groups_now()
        self._held.take(self.partition, groups)
        return groups

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
        self._held.take(self.partition, self.groups_now())
        self.on_cancel()

    # -- for the dispatcher ----------------------------------------------------------------

    @property
    def sinks(self) -> bool:
        """Whether rows and markers go to the dispatcher's queue."""
        return self.within is None

    def groups_now(self) -> list[Group]:
        """The groups as they are."""
        return [prompt.group for prompt in self.prompts]

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
            self._held.batch_ended(self)
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
            tokens=self.tokens,
            seconds=self.elapsed() if self.seconds is None else self.seconds,
        )


class Held:
    """The prompts of a dispatcher that run, or whose groups nobody has taken.

    Any thread may call; `changed` is notified when a batch has ended and, while a call waits for
    some of the prompts (`waiting_for_some`), with every group.
    """

    def __init__(self, config: ReplayConfig) -> None:
        self.changed = threading.Condition()
        self.waiting_for_some = 0
        self._config = config
        self._prompts: dict[tuple[str, str], Prompt] = {}  # by partition and uid
        self._ahead: dict[str, Partition] = {}

    def ahead(self, name: str) -> Partition:
        """The groups of a partition that any call may take."""
        return self._ahead.setdefault(name, Partition(name, self._config))

    def add(self, batch: BatchHandle) -> None:
        """Hold a batch's prompts from now on.

        Raises
        ------
        BatchError
            An earlier prompt of a uid runs, or its group was not taken: two would share keys.
        """
        places = {(batch.partition, prompt.uid): prompt for prompt in batch.prompts}
        with self.changed:
            for _, uid in places.keys() & self._prompts.keys():
                raise BatchError(
                    f"an earlier prompt of the uid {uid!r} is in flight",
                    "uid",
                    "give this one a uid of its own; or first take the other's group, or give it "
                    "up: cancel its batch",
                )
            uids = {prompt.uid for prompt in batch.prompts}
            for (name, uid), prompt in self._prompts.items():
                if name == batch.partition and prompt.batch.sinks:
                    uids.add(uid)
            for uid in uids if batch.sinks else ():
                if (of := uid_of(uid)) in uids:
                    raise BatchError(
                        f"the uid {uid!r} is a key of a session of the prompt {of!r}",
                        "uid",
                        "give it one that does not end in _sess0, or in _0_0, after another's uid",
                    )
            self._prompts.update(places)
            if batch.within is not None:
                for prompt in batch.prompts:
                    batch.within.file(prompt.group)

    def group_ended(self, prompt: Prompt) -> None:
        """A group has all its sessions; one that is in a queue is not held."""
        with self.changed:
            if prompt.batch.within is None:
                self.take(prompt.batch.partition, [prompt.group])
            else:
                prompt.batch.within.file(prompt.group)
            if self.waiting_for_some:
                self.changed.notify_all()

    def batch_ended(self, batch: BatchHandle) -> None:
        """A batch has its report, or its error."""
        with self.changed:
            if batch.sinks:
                self.take(batch.partition, batch.groups_now())
            self.changed.notify_all()

    def take(self, partition: str, groups: Iterable[Group]) -> None:
        """Hold these no more."""
        with self.changed:
            for group in groups:
                prompt = self._prompts.get((partition, group.uid))
                if prompt is not None and prompt.group is group:
                    del self._prompts[partition, group.uid]
                    if prompt.batch.within is not None:
                        prompt.batch.within.remove([group.uid])
