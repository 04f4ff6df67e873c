"""Which session runs next, and on which worker: policies, and a state machine without clock or I/O.

A policy is a function from a :class:`PendingSession` to a :class:`Placement`. It is called when
a session starts to wait and, if it uses lengths, for its rank again before it runs, where other
sessions of its prompt have started or finished by then.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
import pkgutil
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import attrs

from rlskip.config.check import did_you_mean
from rlskip.dispatch.sessions import portable
from rlskip.errors import ConfigError


class PendingSession(NamedTuple):
    """A session that waits, as policies see it.

    Its prompt's position in the batch and the batch's number of `prompts`; its id and its prompt's
    number `n` of sessions; its `number` among all sessions submitted so far; the number of
    `workers`; how many of its prompt's sessions have `started`; and their mean length, from those
    that have finished and from the history, or None when unknown (`expected`).
    """

    prompt: int
    prompts: int
    session: int
    n: int
    number: int
    workers: int
    started: int
    expected: float | None


@attrs.frozen
class Placement:
    """Where and when a session runs.

    `worker` runs it (another one if that is lost); None for the worker that runs the fewest
    sessions. Lower ranks go first; equal ranks in order of arrival.
    """

    worker: int | None = attrs.field(
        default=None, converter=attrs.converters.optional(operator.index)
    )
    rank: float = attrs.field(default=0.0, converter=float)


Policy = Callable[[PendingSession], Placement]

_ANYWHERE = Placement()


def chunk(session: PendingSession) -> Placement:
    """Split the batch into one run of prompts per worker: a prompt stays on one worker."""
    return Placement(worker=session.prompt * session.workers // session.prompts)


def round_robin(session: PendingSession) -> Placement:
    """Assign sessions to workers in turn; the next batch continues where this one ended."""
    return Placement(worker=session.number % session.workers)


def least_loaded(session: PendingSession) -> Placement:
    """The next free slot takes the next session."""
    return _ANYWHERE


def longest_first(session: PendingSession) -> Placement:
    """Start the sessions with the longest expected length first, so that no long one runs last.

    For a prompt without known lengths, one session runs first as a probe. While the probe runs,
    the prompt counts as longer than every known one, because it has outlived their probes.
    """
    if session.expected is not None:
        return Placement(rank=-session.expected)
    return Placement(rank=-math.inf if session.started == 0 else -1e300)


BLIND = (chunk, round_robin, least_loaded)  # policies that use no lengths

POLICIES: dict[str, Policy] = {policy.__name__: policy for policy in (*BLIND, longest_first)}


def find_policy(name: str) -> Policy:
    """The policy called `name`, or the function that ``package.module:function`` names."""
    try:
        found: Any = POLICIES.get(name) or pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        remedy = f"{did_you_mean(name, POLICIES)}; name your own as package.module:function"
        what = f"there is no policy {name!r}: {error}"
        raise ConfigError(what, "dispatch.policy", remedy) from error
    if not callable(found):
        raise ConfigError(f"{name!r} is not a function", "dispatch.policy")
    return found  # type: ignore[no-any-return]


@attrs.define(eq=False)
class SessionGroup:
    """A prompt's sessions: its position among the `prompts` of its batch, and their number `n`.

    `lengths` are the number and the sum of the lengths that are known: of its sessions that have
    finished, and of those of other prompts of its content.
    """

    prompt: int
    prompts: int
    n: int
    lengths: list[float] = attrs.field(factory=lambda: [0, 0.0])
    started: int = attrs.field(default=0, init=False)


@attrs.define(eq=False)
class Job:
    """An attempt at a session of a prompt; the one before it failed on worker `avoid`.

    `failures` says of each earlier attempt whether the infrastructure caused its failure. What has
    run has a worker, and what that was told; what has ended its rows (None
    if the worker wrote them itself) with the tags that were journaled, or its error.
    """

    group: Any
    session_id: int
    number: int = -1
    attempt: int = 0
    avoid: int | None = None
    failures: tuple[bool, ...] = ()
    worker: int = -1
    session: Any = None
    started: float = 0.0
    rows: list[Any] | None = None
    tags: Sequence[Mapping[str, Any]] = ()
    error: str = ""
    knew: float = 0  # sessions that had started, and lengths, when the policy ranked it

    def __str__(self) -> str:
        where = f"(attempt {self.attempt}, worker {self.worker})"
        return f"session {self.session_id} of {self.group.uid} {where}"


class Scheduler:
    """Assigns sessions to workers ``0 .. workers-1``, at most `per_worker` at once to each.

    It holds the sessions that wait and those that run, and forgets those that have ended.
    `policy` decides where each session goes, and when. Nothing starts on a worker that is not
    among those that are `there`.
    """

    def __init__(self, workers: int, policy: Policy, per_worker: int | None = None) -> None:
        self.workers = workers
        self.there = {*range(workers)}
        self.running: dict[Job, None] = {}  # in the order in which they started
        self.uses_lengths = policy not in BLIND
        self._policy = policy
        self._per_worker = per_worker or math.inf
        self._load = dict.fromkeys(range(workers), 0)
        self._numbers = itertools.count()
        # A session waits here, to be tried again, or by the worker that it must go to (None: any),
        # as rank, number and job: the number orders equal ranks.
        self._again: list[Job] = []
        self._waiting: dict[int | None, list[tuple[float, int, Job]]] = {None: []}

    def add(self, group: SessionGroup, attempts: Mapping[int, int]) -> None:
        """Queue sessions of `group`, each from an attempt of this number on."""
        for session, attempt in attempts.items():
            job = Job(group, session, next(self._numbers), attempt)
            place = self._place(job)
            self._wait(job, place.rank, place.worker)

    def next(self) -> Job | None:
        """What to start next; None without a pending session or a free slot."""
        load, most = self._load, self._per_worker
        free = [worker for worker in self.there if load[worker] < most]
        for job in self._again:  # what is tried again goes first, elsewhere if it can
            if others := [w for w in free if w != job.avoid or len(self.there) == 1]:
                self._again.remove(job)
                return self._assign(job, min(others, key=load.__getitem__))
        bound = [worker for worker in free if self._waiting.get(worker)]
        if not (bound or (free and self._waiting[None])):
            return None
        worker = min(bound or free, key=load.__getitem__)
        return self._assign(self._pop(self._waiting[worker if bound else None]), worker)

    def _pop(self, heap: list[tuple[float, int, Job]]) -> Job:
        while True:
            rank, number, job = heapq.heappop(heap)
            # Asked without a cause, a policy that ranks by the time would let none be the first.
            knows = job.group.started + job.group.lengths[0]
            if not self.uses_lengths or job.knew == knows:
                return job
            rank = self._place(job).rank
            if not heap or (rank, number) <= heap[0][:2]:
                return job
            heapq.heappush(heap, (rank, number, job))

    def _assign(self, job: Job, worker: int) -> Job:
        job.worker = worker
        self.running[job] = None
        self._load[worker] += 1
        job.group.started += 1
        return job

    def done(self, job: Job, length: float | None = None) -> None:
        """`job` has finished; `length` is what it produced, None when it failed."""
        del self.running[job]
        self._load[job.worker] -= 1
        if length is not None:
            job.group.lengths[0] += 1
            job.group.lengths[1] += length

    def retry(self, job: Job) -> None:
        """`job` failed: queue the next attempt, first and for another worker if there is one."""
        self.done(job)
        attempt = job.attempt + 1, job.worker, job.failures
        self._again.append(Job(job.group, job.session_id, job.number, *attempt))

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
        of, (known, length) = job.group, job.group.lengths
        job.knew = of.started + known
        counts = of.n, job.number, self.workers, of.started, length / known if known else None
        try:
            place = self._policy(PendingSession(of.prompt, of.prompts, job.session_id, *counts))
        except BaseException as error:  # it is the user's: nothing of it may end an event loop
            raise portable(error)  # noqa: B904 - has its cause
        if isinstance(place, Placement):
            return place
        raise ConfigError(
            f"the policy returned a {type(place).__name__}",
            "dispatch.policy",
            "return a Placement: the number of a worker, or None, and a rank",
        )
