"""Which session runs next, and on which worker: a state machine without clock or I/O.

It holds the sessions that wait, counts those that run, and forgets those that have ended. Its
driver is a dispatcher, or a simulation.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
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

    The attempts at a session share `failures`: how often the infrastructure failed, and how often
    it did not. What has run has a worker, and what that was told; what has ended its rows (None if
    the worker wrote them itself) with the tags that were journaled, or its error.
    """

    group: Any
    session_id: int
    number: int = -1
    attempt: int = 0
    avoid: int | None = None
    failures: Counter[bool] = attrs.field(factory=Counter)
    worker: int = -1
    session: Any = None
    started: float = 0.0
    rows: list[dict[str, Any]] | None = None
    tags: Sequence[Mapping[str, Any]] = ()
    error: str = ""

    def __str__(self) -> str:
        where = f"(attempt {self.attempt}, worker {self.worker})"
        return f"session {self.session_id} of {self.group.uid} {where}"


class Scheduler:
    """Assigns sessions to workers ``0 .. workers-1``, at most `per_worker` at once to each.

    `policy` decides where each session goes, and when. Nothing starts on a worker that is not
    among those that are `there`.
    """

    def __init__(self, workers: int, policy: Policy, per_worker: int | None = None) -> None:
        self.workers = workers
        self.there = {*range(workers)}
        self._policy = policy
        self._per_worker = per_worker or math.inf
        self._load = dict.fromkeys(range(workers), 0)
        self._numbers = itertools.count()
        # A session waits here, to be tried again, or by the worker that it must go to (None: any),
        # as rank, number and job: the number orders equal ranks.
        self._again: list[Job] = []
        self._waiting: dict[int | None, list[tuple[float, int, Job]]] = {None: []}

    def add(self, group: SessionGroup, attempts: Mapping[int, int] | None = None) -> None:
        """Queue sessions of `group`, each from an attempt of this number on; None: all, from 0."""
        attempts = dict.fromkeys(range(group.n), 0) if attempts is None else attempts
        for session, attempt in attempts.items():
            job = Job(group, session, next(self._numbers), attempt)
            place = self._place(job)
            self._wait(job, place.rank, place.worker)

    def next(self) -> Job | None:
        """What to start next; None without a pending session or a free slot."""
        if not self._again and not any(self._waiting.values()):
            return None
        free = [worker for worker in self.there if self._load[worker] < self._per_worker]
        free.sort(key=self._load.__getitem__)
        for job in self._again:  # what is tried again goes first, elsewhere if it can
            others = [w for w in free if w != job.avoid or len(self.there) == 1]
            if others:
                self._again.remove(job)
                return self._assign(job, others[0])
        pinned = [(worker, self._waiting[worker]) for worker in free if worker in self._waiting]
        for worker, heap in [*pinned, *((worker, self._waiting[None]) for worker in free[:1])]:
            if heap:
                return self._assign(self._pop(heap), worker)
        return None

    def _pop(self, heap: list[tuple[float, int, Job]]) -> Job:
        while True:
            _, number, job = heapq.heappop(heap)
            rank = self._place(job).rank  # other lengths are known by now
            if not heap or (rank, number) <= heap[0][:2]:
                return job
            heapq.heappush(heap, (rank, number, job))

    def _assign(self, job: Job, worker: int) -> Job:
        job.worker = worker
        self._load[worker] += 1
        job.group.started += 1
        return job

    def done(self, job: Job, length: float | None = None) -> None:
        """`job` has finished; `length` is what it produced, None when it failed."""
        self._load[job.worker] -= 1
        if length is not None:
            job.group.finished += 1
            job.group.length += length

    def retry(self, job: Job) -> None:
        """`job` failed: queue the next attempt, first and for another worker if there is one."""
        self.done(job)
        again = Job(job.group, job.session_id, job.number, job.attempt + 1, job.worker)
        again.failures = job.failures
        self._again.append(again)

    def cancel(self, groups: Collection[SessionGroup]) -> None:
        """Start no more sessions of `groups`; those that run must still be reported."""
        self._again = [job for job in self._again if job.group not in groups]
        for heap in self._waiting.values():
            heap[:] = [entry for entry in heap if entry[2].group not in groups]
            heapq.heapify(heap)

    def change(self, worker: int, is_there: bool) -> None:
        """A worker has gone, and what waits for it goes to the others; or it is back.

        What ran on it must still be reported, with `done` or `retry`.
        """
        if is_there:
            self.there.add(worker)
            return
        self.there.discard(worker)
        for rank, _, job in self._waiting.pop(worker, ()):
            self._wait(job, rank, None)

    def _wait(self, job: Job, rank: float, worker: int | None) -> None:
        heap = self._waiting.setdefault(worker if worker in self.there else None, [])
        heapq.heappush(heap, (rank, job.number, job))

    def _place(self, job: Job) -> Placement:
        if self._policy is least_loaded:  # which looks at nothing
            return ANYWHERE
        of = job.group
        counts = of.n, job.number, self.workers, of.started
        try:
            place = self._policy(
                PendingSession(of.prompt, of.prompts, job.session_id, *counts, of.mean())
            )
        except BaseException as error:  # it is the user's: nothing of it may end an event loop
            raise portable(error)  # noqa: B904 - has its cause
        if isinstance(place, Placement):
            return place
        raise ConfigError(
            f"the policy returned a {type(place).__name__}",
            "dispatch.policy",
            "return a Placement: the number of a worker, or None, and a rank",
        )
