"""Which session runs next, and on which worker: a state machine without clock or I/O.

It holds the sessions that wait, counts those that run, and forgets those that have ended. Its
driver is a dispatcher, or a simulation.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs

from rlskip.dispatch.policies import ANYWHERE, PendingSession, Placement, Policy, least_loaded
from rlskip.dispatch.sessions import portable
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
    started: int = attrs.field(default=0, init=False)
    finished: int = attrs.field(default=0, init=False)
    length: float = attrs.field(default=0.0, init=False)  # of those that have finished

    def mean(self) -> float | None:
        """The mean known length; the history weighs as much as n finished sessions."""
        count, length = self.finished, self.length
        if self.expected is not None:
            count, length = count + self.n, length + self.n * self.expected
        return length / count if count else None


@attrs.define(eq=False)
class Job:
    """An attempt at a session of a prompt; the one before it failed on worker `avoid`.

    The attempts at a session share `failures`, which counts them by kind. Once it runs it has a
    worker, what that is told, when it started and when it is due; once it has ended, its rows (None
    if the worker wrote them itself) with the tags that were journaled, or its error.
    """

    group: Any
    session_id: int
    number: int = -1
    attempt: int = 0
    avoid: int | None = None
    failures: dict[bool, int] = attrs.field(factory=dict)
    worker: int = -1
    session: Any = None
    started: float = 0.0
    due: float = 0.0
    rows: list[dict[str, Any]] | None = None
    tags: Sequence[Mapping[str, Any]] = ()
    error: str = ""

    def __str__(self) -> str:
        where = f"(attempt {self.attempt}, worker {self.worker})"
        return f"session {self.session_id} of {self.group.uid} {where}"


Entry = tuple[float, int, Job]
"""Rank, number and session: the number orders equal ranks."""


class Scheduler:
    """Assigns sessions to workers ``0 .. workers-1``, at most `per_worker` at once to each.

    `policy` decides where each session goes, and when.
    """

    def __init__(self, workers: int, policy: Policy, per_worker: int | None = None) -> None:
        # A session that was added waits in one heap, runs, or has ended. `_load` counts those that
        # run on each live worker.
        self.workers = workers
        self._policy = policy
        self._per_worker = per_worker or math.inf
        self._load = dict.fromkeys(range(workers), 0)
        self._away: set[int] = set()
        self._numbers = itertools.count()
        self._waiting: dict[int | None, list[Entry]] = {None: []}  # by worker; None: any

    @property
    def alive(self) -> list[int]:
        """The workers that are not lost."""
        return list(self._load)

    def add(self, group: SessionGroup, attempts: Mapping[int, int] | None = None) -> None:
        """Queue sessions of `group`, each from an attempt of this number on; None: all, from 0."""
        attempts = dict.fromkeys(range(group.n), 0) if attempts is None else attempts
        for session, attempt in attempts.items():
            job = Job(group, session, next(self._numbers), attempt)
            place = self._place(job)
            self._wait(job, place.rank, place.worker)

    def next(self) -> Job | None:
        """What to start next; None without a pending session or a free slot."""
        if not any(self._waiting.values()):
            return None
        present = self._present()
        free = [worker for worker in present if self._load[worker] < self._per_worker]
        free.sort(key=self._load.__getitem__)
        anywhere = self._waiting[None]
        pinned = [worker for worker in free if worker in self._waiting]
        heaps = [(anywhere, free), *((self._waiting[worker], [worker]) for worker in pinned)]
        if not anywhere or anywhere[0][2].avoid is None:  # what is tried again goes first
            heaps.append(heaps.pop(0))
        for heap, workers in heaps:
            if heap and workers and (job := self._pop(heap, workers, len(present) == 1)):
                return job
        return None

    def _pop(self, heap: list[Entry], workers: list[int], alone: bool) -> Job | None:
        """Assign the first session of a heap that one of these workers may run."""
        passed: list[Entry] = []
        found = None
        while heap and found is None:
            entry = _, number, job = heapq.heappop(heap)
            if job.avoid is None:
                rank = self._place(job).rank  # other lengths are known by now
                if heap and (rank, number) > heap[0][:2]:
                    heapq.heappush(heap, (rank, number, job))
                    continue
            others = workers if alone else [worker for worker in workers if worker != job.avoid]
            if others:
                found = job
                job.worker = others[0]
                self._load[job.worker] += 1
                job.group.started += 1
            else:
                passed.append(entry)
        for entry in passed:
            heapq.heappush(heap, entry)
        return found

    def done(self, job: Job, length: float | None = None) -> None:
        """`job` has finished; `length` is what it produced, None when it failed."""
        if job.worker in self._load:
            self._load[job.worker] -= 1
        if length is not None:
            job.group.finished += 1
            job.group.length += length

    def retry(self, job: Job) -> None:
        """`job` failed: queue the next attempt, first and for another worker if there is one."""
        self.done(job)
        again = attrs.evolve(job, attempt=job.attempt + 1, avoid=job.worker)
        self._wait(again, -math.inf, None)

    def cancel(self, groups: Collection[SessionGroup]) -> None:
        """Start no more sessions of `groups`; those that run must still be reported."""
        for heap in self._waiting.values():
            heap[:] = [entry for entry in heap if entry[2].group not in groups]
            heapq.heapify(heap)

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
            for rank, _, job in self._waiting.pop(worker, ()):
                self._wait(job, rank, None)

    def _present(self) -> list[int]:
        return [worker for worker in self._load if worker not in self._away]

    def _wait(self, job: Job, rank: float, worker: int | None) -> None:
        heap = self._waiting.setdefault(worker if worker in self._present() else None, [])
        heapq.heappush(heap, (rank, job.number, job))

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
            group.started,
            group.mean(),
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
