"""Which session runs next, and on which worker: a state machine without clock or I/O.

It holds the sessions that wait, counts those that run, and forgets those that have ended. Its
driver is a dispatcher, or a simulation.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from typing import Any

import attrs

from rlskip.dispatch.failures import portable
from rlskip.dispatch.policies import ANYWHERE, PendingSession, Placement, Policy, least_loaded
from rlskip.errors import ConfigError


@attrs.define(eq=False)
class SessionGroup:
    """A prompt's sessions: its position among the `prompts` of its batch, and their number `n`.

    `expected` is their mean length in the history; None when unknown.
    """

    prompt: int
    prompts: int
    n: int
    expected: float | None = None
    cancelled: bool = attrs.field(default=False, init=False)
    _waiting: deque[Job] = attrs.field(factory=deque, init=False)
    _started: int = attrs.field(default=0, init=False)
    _finished: int = attrs.field(default=0, init=False)
    _length: float = attrs.field(default=0.0, init=False)
    _turn: int = attrs.field(default=0, init=False)


@attrs.define(eq=False)
class Job:
    """An attempt at a session of a prompt; the one before it failed on worker `avoid`.

    The attempts at a session share `failures`, for who counts them by kind. What a job has once it
    runs: its worker, what that is told, when it started (a time of its batch) and is due (one of
    the event loop).
    """

    group: Any
    session_id: int
    number: int
    attempt: int = 0
    avoid: int | None = None
    failures: dict[Any, int] = attrs.field(factory=dict)
    worker: int = -1
    session: Any = None
    started: float = 0.0
    due: float = 0.0

    def __str__(self) -> str:
        where = f"(attempt {self.attempt}, worker {self.worker})"
        return f"session {self.session_id} of {self.group.uid} {where}"


class Scheduler:
    """Assigns sessions to workers ``0 .. workers-1``, at most `per_worker` at once to each.

    `policy` decides where each session goes, and when.
    """

    def __init__(self, workers: int, policy: Policy, per_worker: int | None = None) -> None:
        # A session that was added waits in exactly one place (`_waiting` of its group, `_again`, or
        # `_pinned` of a worker), or runs, or has ended; sessions of cancelled groups do not start.
        # `_load` counts the sessions that run on each live worker. Of a group, only the entry of
        # `_anywhere` with its latest turn counts.
        self.workers = workers
        self._policy = policy
        self._per_worker = per_worker or float("inf")
        self._load = dict.fromkeys(range(workers), 0)
        self._away: set[int] = set()
        self._number = 0
        self._again: deque[Job] = deque()
        # Entries are (rank, number, ...): the number makes them unique and orders equal ranks.
        self._anywhere: list[tuple[float, int, int, SessionGroup]] = []
        self._room = 64
        self._pinned: dict[int, list[tuple[float, int, Job]]] = {}  # of workers some wait for

    @property
    def alive(self) -> list[int]:
        """The workers that are not lost."""
        return list(self._load)

    def add(self, group: SessionGroup, attempts: Mapping[int, int] | None = None) -> None:
        """Queue sessions of `group`, each from an attempt of this number on; None: all, from 0."""
        attempts = dict.fromkeys(range(group.n), 0) if attempts is None else attempts
        for session, attempt in attempts.items():
            job = Job(group, session, self._number, attempt)
            self._number += 1
            place = self._place(job)
            if place.worker is None:
                group._waiting.append(job)
            else:
                self._pin(place.worker, place.rank, job)
        self._queue(group)

    def next(self) -> Job | None:
        """What to start next; None without a pending session or a free slot."""
        if not (self._again or self._anywhere or self._pinned):
            return None
        load = self._load
        free = [w for w in self._present() if load[w] < self._per_worker]
        free.sort(key=load.__getitem__)
        found = free and (
            self._next_again(free) or self._next_pinned(free) or self._next_anywhere(free)
        )
        if not found:
            return None
        worker, job = found
        job.worker = worker
        load[worker] += 1
        job.group._started += 1
        self._queue(job.group)
        return job

    def done(self, job: Job, length: float | None = None) -> None:
        """`job` has finished; `length` is what it produced, None when it failed."""
        self._release(job.worker)
        group = job.group
        if length is not None:
            group._finished += 1
            group._length += length
            self._queue(group)

    def retry(self, job: Job) -> None:
        """`job` failed: queue the next attempt, for another worker if there is one."""
        self._release(job.worker)
        self._again.append(attrs.evolve(job, attempt=job.attempt + 1, avoid=job.worker))

    def cancel(self, group: SessionGroup) -> None:
        """Start no more sessions of `group`; those that run must still be reported."""
        group.cancelled = True
        group._waiting.clear()

    def change(self, worker: int, state: str) -> None:
        """`worker` is ``lost`` for good, or ``away``: nothing starts there until it is ``back``.

        What waited for it goes to the others. What ran on it must still be reported, with `done`
        or `retry`.
        """
        self._away.discard(worker)
        if state == "lost":
            self._load.pop(worker, None)
        elif state == "away":
            self._away.add(worker)
        if state != "back":
            for rank, _, job in sorted(self._pinned.pop(worker, ())):
                self._pin(worker, rank, job)

    def _present(self) -> list[int]:
        return [worker for worker in self._load if worker not in self._away]

    def _place(self, job: Job) -> Placement:
        if self._policy is least_loaded:  # which looks at nothing
            return ANYWHERE
        group = job.group
        session = PendingSession(
            group.prompt,
            group.prompts,
            job.session_id,
            group.n,
            job.number,
            self.workers,
            group._started,
            _expected(group),
        )
        try:
            place = self._policy(session)
        except BaseException as error:  # it is the user's: nothing of it may end an event loop
            raise portable(error)  # noqa: B904 - has its cause
        if isinstance(place, Placement):
            return place
        raise ConfigError(
            f"the policy returned a {type(place).__name__}",
            "dispatch.policy",
            "return a Placement: the number of a worker, or None, and a rank",
        )

    def _pin(self, worker: int, rank: float, job: Job) -> None:
        present = self._present()
        if not present:
            self._again.append(job)
            return
        if worker not in present:
            worker = present[worker % len(present)]
        heapq.heappush(self._pinned.setdefault(worker, []), (rank, job.number, job))

    def _queue(self, group: SessionGroup) -> None:
        """Queue the next session of `group`, with its current rank; an older entry becomes void."""
        if group._waiting:
            group._turn += 1
            head = group._waiting[0]
            entry = self._place(head).rank, head.number, group._turn, group
            heapq.heappush(self._anywhere, entry)
        if len(self._anywhere) > self._room:
            self._anywhere = [entry for entry in self._anywhere if _holds(entry)]
            heapq.heapify(self._anywhere)
            self._room = 64 + 2 * len(self._anywhere)

    def _next_again(self, free: list[int]) -> tuple[int, Job] | None:
        alone = len(self._present()) == 1
        for job in list(self._again):
            elsewhere = [worker for worker in free if worker != job.avoid]
            if job.group.cancelled or elsewhere or alone:
                self._again.remove(job)
            if not job.group.cancelled and (elsewhere or alone):
                return (elsewhere or free)[0], job
        return None

    def _next_pinned(self, free: list[int]) -> tuple[int, Job] | None:
        for worker in free if self._pinned else ():
            heap = self._pinned.pop(worker, [])
            while heap:
                _, _, job = heapq.heappop(heap)
                if not job.group.cancelled:
                    if heap:
                        self._pinned[worker] = heap
                    return worker, job
        return None

    def _next_anywhere(self, free: list[int]) -> tuple[int, Job] | None:
        while self._anywhere:
            entry = heapq.heappop(self._anywhere)
            if _holds(entry):
                return free[0], entry[-1]._waiting.popleft()
        return None

    def _release(self, worker: int) -> None:
        if worker in self._load:
            self._load[worker] -= 1


def _expected(group: SessionGroup) -> float | None:
    """The mean known length; the history weighs as much as n finished sessions."""
    count, length = group._finished, group._length
    if group.expected is not None:
        count, length = count + group.n, length + group.n * group.expected
    return length / count if count else None


def _holds(entry: tuple[float, int, int, SessionGroup]) -> bool:
    """Whether an entry is the latest of its group, and the group has pending sessions."""
    _, _, turn, group = entry
    return turn == group._turn and bool(group._waiting)
