"""The calls of the step at which the loop is, and the dumps that may serve them.

A call's name is the digest of its role, stage and prompts, and its number among the step's calls
of that digest. The name says where to look, the identity in ``meta.json`` judges: arguments, config
and what is ignored never move a dump. So equal calls keep their draws, and calls of other prompts
find their own dumps in any order.
"""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from rlskip.store import StepStore
from rlskip.store.layout import Place


@attrs.frozen
class Key:
    """Where a dump is: the call of a step, which is empty for its first call.

    ``size`` is the directory of its run, if that has another number of prompts a step.
    """

    step: int
    call: str = ""
    size: str = ""

    @property
    def place(self) -> Place:
        """Below the run's directory, of one rank."""
        return Place(Path(), self.step, self.call)

    @property
    def path(self) -> str:
        return self.place.name

    def __str__(self) -> str:
        return f"step {self.step}" + (f", call {self.call}" if self.call else "")


class StepCalls:
    """Names the calls of one visit of a step, and knows which dumps serve none of them any more.

    Hold `lock` from :meth:`begin` until :meth:`take`. The step's directory is listed once, so that
    a call costs the same in a step of 10 000.
    """

    def __init__(self, store: StepStore, step: int) -> None:
        self.lock = threading.RLock()
        self.step = step
        self._store, self._first = store, store.directory / str(step)
        # Heaps of the numbers that were given back, and the next: of each digest, and the places.
        self._free: dict[str, list[int]] = {}
        self.taken: set[Key] = set()
        self._written: set[Key] = set()
        self._in_order: list[str] = []
        # Dumps of the digest under other numbers, as they were when the visit began.
        self._siblings: dict[str, dict[str, None]] = {}
        # The checksums of those of a digest that have served a call of the visit.
        self._served: dict[str, dict[str, str]] = {}
        self.listed = dict.fromkeys(store.calls(step))
        for call in self.listed:
            self._siblings.setdefault(call.rpartition("-")[0], {})[call] = None
        self._has_lost = False

    @property
    def is_whole(self) -> bool:
        """Whether the step has its first dump, and none of it is known to be missing."""
        there = {*self._store.calls(self.step)}
        return "" in there and not self._has_lost and there >= {*self._store.quarantined(self.step)}

    @property
    def in_order(self) -> list[str]:
        """For a repeat: the calls with a sound dump, as they were made; not what the visit writes.

        Another job may have dumped the step while this one waited for it, so that a step without a
        first dump is looked at again.
        """
        head = Key(self.step, "")
        if not self._in_order and head not in self._written and os.path.isdir(self._first):
            there = self._store.in_order(self.step)
            self._in_order = [call for call in there if Key(self.step, call) not in self._written]
        return self._in_order

    def begin(self, digest: str) -> tuple[str, int]:
        """The name of a new call, and its place among the calls of the visit."""
        numbers: list[int] = []
        with self.lock:
            for of in (digest, ""):
                free = self._free.setdefault(of, [0])
                numbers.append(heapq.heappop(free))
                if not free:
                    free.append(numbers[-1] + 1)
        number, place = numbers
        return f"{digest}-{number}", place

    def end(self, name: str, place: int) -> None:
        """A call has failed: when it is made again, it is the same call."""
        with self.lock:
            digest, _, number = name.rpartition("-")
            heapq.heappush(self._free[digest], int(number))
            heapq.heappush(self._free[""], place)

    def candidates(self, name: str, place: int) -> Iterator[Key]:
        """Where a dump of such a call may be: its own place, the head, others of its digest.

        The head is the own place of the visit's first call. Of those that are taken only its own is
        among them: it has served an equal call.
        """
        digest, _, number = name.rpartition("-")
        own = (name, "") if place else ("", name)
        for call in (*own, *self._siblings.get(digest, ())):
            key = Key(self.step, call)
            if key not in self.taken or call == name or (number == "0" and not call):
                yield key

    def served(self, name: str) -> Iterable[str]:
        """The checksums of later dumps of such a call that have served another one of the visit."""
        return self._served.get(name.rpartition("-")[0], {}).values()

    def take(self, key: Key, checksum: str = "", *, writes: bool = False) -> None:
        """This dump serves a call, or a call `writes` it: it serves no other one."""
        with self.lock:
            self.taken.add(key)
            if writes:
                self._written.add(key)
            if key.step == self.step:  # another step's has the same names
                digest = key.call.rpartition("-")[0]
                self._siblings.get(digest, {}).pop(key.call, None)
                if checksum and digest:
                    self._served.setdefault(digest, {})[key.call] = checksum

    def give_back(self, key: Key, *, is_lost: bool = False) -> None:
        """It did not serve the call after all: it may serve another one, unless it is unusable."""
        with self.lock:
            self.taken.discard(key)
            self._has_lost |= is_lost
            digest = key.call.rpartition("-")[0]
            if key.step == self.step and digest and key.call in self.listed:
                self._served.get(digest, {}).pop(key.call, None)
                if not is_lost:
                    self._siblings.setdefault(digest, {})[key.call] = None


def next_name(own: str, tried: str) -> str:
    """The name to try after one that was taken: the call's own, then the next number."""
    digest, _, number = (tried or own).rpartition("-")
    return f"{digest}-{int(number) + 1}" if tried else own
