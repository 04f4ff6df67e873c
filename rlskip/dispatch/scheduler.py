"""Which session runs next, and on which worker: a state machine without clock or I/O.

Its driver, a pool or a simulation, adds sessions (:meth:`Scheduler.add`), asks for the next one
to run (:meth:`Scheduler.next`) and reports its end (:meth:`Scheduler.done` or
:meth:`Scheduler.retry`). The scheduler holds the sessions that wait and counts those that run;
it forgets those that have ended.
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
from rlskip.keys import integer


@attrs.define(eq=False)
class SessionGroup:
    """A prompt's sessions, as the scheduler sees them.

    Parameters
    ----------
    prompt, prompts
        The prompt's position in its batch, and the batch's size.
    n
        Its number of sessions.
    expected
        Their mean length in the history; None when unknown.
    """

    prompt: int
    prompts: int
    n: int
    expected: float | None = None
    cancelled: bool = attrs.field(default=False, init=False)
    _waiting: deque[Item] = attrs.field(factory=deque, init=False)
    _started: int = attrs.field(default=0, init=False)
    _finished: int = attrs.field(default=0, init=False)
    _length: float = attrs.field(default=0.0, init=False)
    _turn: int = attrs.field(default=0, init=False)


@attrs.define(eq=False)
class Item:
    """One session of one prompt, at its `attempt`-th attempt; it failed last on worker `avoid`.

    Its attempts share `failures`, for who counts them by kind.
    """

    group: SessionGroup
    session: int
    number: int
    attempt: int = 0
    avoid: int | None = None
    failures: dict[Any, int] = attrs.field(factory=dict)


class Scheduler:
    """Assigns sessions to workers ``0 .. workers-1``.

    Parameters
    ----------
    workers
        The number of workers.
    policy
        Where each session goes, and when.
    per_worker
        The number of sessions that may run at once on one worker; None: no limit.
    """

    def __init__(self, workers: int, policy: Policy, per_worker: int | None = None) -> None:
        # A session that was added waits in exactly one place (`_waiting` of its group, `_again`, or
        # `_pinned` of a worker), or runs, or has ended; sessions of cancelled groups do not start.
        # `_load` counts the sessions that run on each live worker. Of a group, only the entry of
        # `_anywhere` with its latest turn counts.
        self.workers = workers
        self._policy = policy
        self._per_worker = per_worker or float("inf")
        self._load = dict.fromkeys(range(workers), 0)  # of live workers
        self._away: set[int] = set()
        self._number = 0
        self._again: deque[Item] = deque()
        # Entries are (rank, number, ...): the number makes them unique and orders equal ranks.
        self._anywhere: list[tuple[float, int, int, SessionGroup]] = []
        self._room = 64
        self._pinned: dict[int, list[tuple[float, int, Item]]] = {}  # of workers some wait for
        self._present = list(range(workers))

    @property
    def alive(self) -> list[int]:
        """The workers that are not lost."""
        return list(self._load)

    def add(self, group: SessionGroup, attempts: Mapping[int, int] | None = None) -> None:
        """Queue sessions of `group`, each from an attempt of this number on; None: all, from 0."""
        attempts = dict.fromkeys(range(group.n), 0) if attempts is None else attempts
        for session, attempt in attempts.items():
            item = Item(group, session, self._number, attempt)
            self._number += 1
            place = self._place(item)
            if place.worker is None:
                group._waiting.append(item)
            else:
                self._pin(place.worker, place.rank, item)
        self._queue(group)

    def next(self) -> tuple[int, Item] | None:
        """The worker and session to start next; None without a pending session or a free slot."""
        if not (self._again or self._anywhere or self._pinned):
            return None
        load = self._load
        free = [w for w in self._present if load[w] < self._per_worker]
        if not free:
            return None
        free.sort(key=load.__getitem__)
        found = self._next_again(free) or self._next_pinned(free) or self._next_anywhere(free)
        if found is not None:
            worker, item = found
            item.group._started += 1
            self._queue(item.group)
            self._load[worker] += 1
        return found

    def done(self, worker: int, item: Item, length: float | None = None) -> None:
        """`item` has finished; `length` is what it produced, None when it failed."""
        self._release(worker)
        group = item.group
        if length is not None:
            group._finished += 1
            group._length += length
            self._queue(group)

    def retry(self, worker: int, item: Item) -> None:
        """`item` failed on `worker`: queue its next attempt, for another worker if there is one."""
        self._release(worker)
        self._again.append(attrs.evolve(item, attempt=item.attempt + 1, avoid=worker))

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
        self._present = [w for w in self._load if w not in self._away]
        if worker not in self._present:
            for rank, _, item in sorted(self._pinned.pop(worker, ())):
                self._pin(worker, rank, item)

    def _place(self, item: Item) -> Placement:
        if self._policy is least_loaded:  # which looks at nothing
            return ANYWHERE
        group = item.group
        session = PendingSession(
            group.prompt,
            group.prompts,
            item.session,
            group.n,
            item.number,
            self.workers,
            group._started,
            _expected(group),
        )
        try:
            place = self._policy(session)
        except BaseException as error:  # it is the user's: nothing of it may end an event loop
            raise portable(error)  # noqa: B904 - has its cause
        if not (
            isinstance(place, Placement)
            and (place.worker is None or integer(place.worker) is not None)
            and isinstance(place.rank, (int, float))
            and place.rank == place.rank
        ):
            what = place if isinstance(place, Placement) else f"a {type(place).__name__}"
            raise ConfigError(
                f"the policy returned {what!s:.200}",
                "dispatch.policy",
                "return a Placement with the number of a worker, or None, and a number as rank",
            )
        return place

    def _pin(self, worker: int, rank: float, item: Item) -> None:
        if worker not in self._present:
            if not self._present:
                self._again.append(item)
                return
            worker = self._present[worker % len(self._present)]
        heapq.heappush(self._pinned.setdefault(worker, []), (rank, item.number, item))

    def _queue(self, group: SessionGroup) -> None:
        """Queue the next session of `group`, with its current rank; an older entry becomes void."""
        if group._waiting:
            group._turn += 1
            head = group._waiting[0]
            rank = self._place(head).rank
            heapq.heappush(self._anywhere, (rank, head.number, group._turn, group))
        if len(self._anywhere) > self._room:
            self._anywhere = [entry for entry in self._anywhere if _holds(entry)]
            heapq.heapify(self._anywhere)
            self._room = 64 + 2 * len(self._anywhere)

    def _next_again(self, free: list[int]) -> tuple[int, Item] | None:
        for item in list(self._again):
            if item.group.cancelled:
                self._again.remove(item)
                continue
            elsewhere = [w for w in free if w != item.avoid]
            if elsewhere or len(self._present) == 1:
                self._again.remove(item)
                return (elsewhere or free)[0], item
        return None

    def _next_pinned(self, free: list[int]) -> tuple[int, Item] | None:
        for worker in free if self._pinned else ():
            while heap := self._pinned.get(worker):
                _, _, item = heapq.heappop(heap)
                if not heap:
                    del self._pinned[worker]
                if not item.group.cancelled:
                    return worker, item
        return None

    def _next_anywhere(self, free: list[int]) -> tuple[int, Item] | None:
        while self._anywhere:
            entry = heapq.heappop(self._anywhere)
            if _holds(entry):
                return free[0], entry[3]._waiting.popleft()
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
