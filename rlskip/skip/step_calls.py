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
from collections.abc import Iterator
from itertools import chain

from rlskip.store import StepStore
from rlskip.store.layout import Place


class StepCalls:
    """Names the calls of one visit of a step, and knows which dumps serve none of them any more.

    Hold `lock` from :meth:`begin` until :meth:`take`. The step's directory is listed once, so that
    a call costs the same in a step of 10 000.
    """

    def __init__(self, store: StepStore, step: int) -> None:
        self._store, self.step = store, step
        self.lock = threading.RLock()
        # Heaps of the numbers that were given back, and the next: of each digest, and the places.
        self._free: dict[str, list[int]] = {}
        # The dumps that serve a call of the visit, with their checksums; empty: a call writes it.
        self.taken: dict[Place, str] = {}
        self._in_order: list[str] = []
        self.listed = dict.fromkeys(store.calls(step))
        self._listed_of: dict[str, list[str]] = {}  # by digest
        for call in self.listed:
            self._listed_of.setdefault(call.rpartition("-")[0], []).append(call)
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
        head = self._store.place(self.step)
        is_there = os.path.isdir(head.directory)
        if not self._in_order and is_there and self.taken.get(head) != "":
            there = self._store.in_order(self.step)
            mine = {key.call for key, checksum in self.taken.items() if not checksum}
            self._in_order = [call for call in there if call not in mine]
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

    def candidates(self, name: str, place: int) -> Iterator[Place]:
        """Where a dump of such a call may be: its own place, the head, others of its digest.

        The head is the own place of the visit's first call. Of those that are taken only its own is
        among them: it has served an equal call.
        """
        digest, _, number = name.rpartition("-")
        own = (name, "") if place else ("", name)
        for call in chain(own, self._listed_of.get(digest, ())):
            key = self._store.place(self.step, call)
            if key not in self.taken or call == name or (number == "0" and not call):
                yield key

    def served(self, name: str) -> set[str]:
        """The checksums of later dumps of such a call that have served another one of the visit."""
        digest = name.rpartition("-")[0]
        keys = (self._store.place(self.step, call) for call in self._listed_of.get(digest, ()))
        return {*filter(None, map(self.taken.get, keys))}

    def take(self, key: Place, checksum: str = "") -> None:
        """This dump serves a call, or without a `checksum` one writes it: it serves no other."""
        with self.lock:
            self.taken[key] = checksum

    def give_back(self, key: Place, *, is_lost: bool = False) -> None:
        """It did not serve the call after all: it may serve another one, unless it is unusable."""
        with self.lock:
            self.taken.pop(key, None)
            self._has_lost |= is_lost
            self._in_order = [] if is_lost else self._in_order  # a repeat takes what is left


def next_name(own: str, tried: str) -> str:
    """The name to try after one that was taken: the call's own, then the next number."""
    digest, (of, _, number) = own.rpartition("-")[0], tried.rpartition("-")
    return f"{digest}-{int(number) + 1}" if of == digest else own
