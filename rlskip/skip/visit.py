"""A visit of a step: which of the step's dumps have served a call, and which number is free.

A stage may be called several times in a step. In one visit each dump serves one call, in the order
in which the calls were made. The step's directory is listed once, and each ``meta.json`` is read
when a call first needs it, so that a call costs the same in a step of 10 000.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import attrs

from rlskip.store import DumpError, Identity, StepStore

log = logging.getLogger(__name__)


@attrs.frozen
class Found:
    """The dump of call `number` of `step`."""

    step: int
    number: int = 0

    @property
    def path(self) -> str:
        """Below the run's directory."""
        return f"{self.step}/{self.number}" if self.number else str(self.step)

    @property
    def part(self) -> int | None:
        """The part of the step in the store: the first call is the step's own dump."""
        return self.number or None

    def order(self, step: int) -> tuple[int, int]:
        """By what it is preferred as a substitute at `step`, as `by_preference` has it."""
        below = self.step <= step
        return (step - self.step if below else (1 << 62) + self.step), self.number

    def __str__(self) -> str:
        return f"step {self.step}" + (f", call {self.number}" if self.number else "")


@attrs.define(eq=False)
class _Alike:
    """Dumps of one identity: the numbers of those that have not served a call."""

    identity: Identity
    numbers: deque[int]


class Visit:
    """One visit of `step`. Hold `lock` from choosing a dump until :meth:`take`.

    Attributes
    ----------
    calls
        How many calls were served, or are generated.
    listed
        The numbers of the dumps that this visit did not write, ascending.
    lost
        Those of them that turned out to be unusable.
    """

    def __init__(self, store: StepStore, step: int) -> None:
        self.lock = threading.RLock()
        self.step = step
        self.calls = 0
        self.listed = store.calls(step)
        self.lost: set[int] = set()
        self._store = store
        self._unread = deque(self.listed)
        self._alike: dict[str | None, list[_Alike]] = {}
        self._unnamed: deque[int] = deque()  # the dumps that record no identity
        self._unused: dict[int, deque[int]] = {}  # by number, the one of these that has it
        self._answered: Counter[str] = Counter()
        self._used: set[Found] = set()
        self._present = set(self.listed)
        self._reserved: set[int] = set()
        self._low = 0  # the numbers below are taken

    # -- which dumps there are, and which fit --------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether the step has no dump but those that this visit wrote."""
        return len(self.listed) == len(self.lost)

    @property
    def is_damaged(self) -> bool:
        """Whether a dump is missing: it may have been that of a call that fits none."""
        return bool(self.lost) or self.listed != list(range(len(self.listed)))

    def kth(self, place: int) -> Found | None:
        """The dump of that place in the step, else the last one; None if it is lost."""
        number = self.listed[min(place, len(self.listed) - 1)] if self.listed else None
        return None if number is None or number in self.lost else Found(self.step, number)

    def fitting(self, identity: Identity) -> Iterator[Found]:
        """The dumps of this step that were made for such a call and have served none."""
        given: set[int] = set()
        while True:
            number = self._lowest(identity, given)
            if number is not None:
                given.add(number)
                yield Found(self.step, number)
            elif not self._read_next():
                break
        yield from (Found(self.step, number) for number in list(self._unnamed))

    def _lowest(self, identity: Identity, given: set[int]) -> int | None:
        fits = [
            next((n for n in alike.numbers if n not in given), None)
            for alike in self._alike.get(identity.prompts_hash, ())
            if not identity.differences(alike.identity)[0]
        ]
        return min((n for n in fits if n is not None), default=None)

    def nearest(self, identity: Identity) -> tuple[Found, list[str]] | None:
        """The dump that differs least from a call that none fits, and in what."""
        differing = [
            (identity.differences(alike.identity)[0], alike.numbers[0])
            for group in self._alike.values()
            for alike in group
            if alike.numbers
        ]
        if not differing:
            return None
        must, number = min(differing, key=lambda one: (len(one[0]), one[1]))
        return Found(self.step, number), must

    def why_not(self, identity: Identity) -> str:
        """Why no dump serves a call, without looking at all of them."""
        same_prompts = self._alike.get(identity.prompts_hash, ())
        differing = [identity.differences(alike.identity)[0] for alike in same_prompts]
        if not all(differing):
            return "its dumps have served other calls"
        if differing:
            least = min(differing, key=len)
            return "; ".join(least)
        return "no dump of the step has its prompts"

    # -- what becomes of a call ----------------------------------------------------------

    def answer(self, identity: Identity) -> str:
        """Count a call that is served or generated; its name among the step's, in every job."""
        digest = identity.digest()
        self.calls += 1
        self._answered[digest] += 1
        return f"{digest}-{self._answered[digest] - 1}"

    def take(self, found: Found) -> None:
        """This dump serves a call, and no other one."""
        self._used.add(found)
        if found.step == self.step:
            self._forget(found.number)

    def is_used(self, found: Found) -> bool:
        return found in self._used

    def lose(self, found: Found) -> None:
        """A dump turned out to be unusable: its number is free."""
        with self.lock:
            if found.step == self.step:
                self._forget(found.number)
                self.lost.add(found.number)
                self._present.discard(found.number)
                self._low = min(self._low, found.number)

    # -- numbers of new dumps ------------------------------------------------------------

    def next_number(self) -> int:
        """The lowest number that no dump has or will have."""
        with self.lock:
            while self._low in self._present or self._low in self._reserved:
                self._low += 1
            return self._low

    def reserve(self, at_least: int = 0) -> int:
        """The lowest number that is free; nobody else in this visit gets it."""
        with self.lock:
            number = max(self.next_number(), at_least)
            while number in self._present or number in self._reserved:
                number += 1
            self._reserved.add(number)
            return number

    def release(self, number: int) -> None:
        """Give a number back, unless a dump has it meanwhile."""
        with self.lock:
            self._reserved.discard(number)
            self._low = min(self._low, number)

    def wrote(self, number: int) -> None:
        """This visit has written a dump, which has served its call."""
        with self.lock:
            self._reserved.discard(number)
            self._present.add(number)

    def look(self) -> None:
        """Find what other jobs have added to the step since: they take the lowest numbers."""
        with self.lock, contextlib.suppress(DumpError, OSError, MemoryError):
            while self._read(number := self.next_number()) is not None:
                self.others_wrote(number)

    def others_wrote(self, number: int) -> None:
        """Another job has written this dump."""
        with self.lock:
            self._reserved.discard(number)
            self._present.add(number)
            self.lost.discard(number)
            if number not in self.listed:
                bisect.insort(self.listed, number)

    # -- within --------------------------------------------------------------------------

    def _read_next(self) -> bool:
        """Read one more of the listed dumps; False after the last one."""
        if not self._unread:
            return False
        number = self._unread.popleft()
        found = Found(self.step, number)
        try:
            usable = self._read(number) is not None
        except (DumpError, OSError, MemoryError) as error:
            # It stays where it is, and so does its number.
            log.warning("rlskip: %s counts as a miss: %s", found, error)
            self.lost.add(number)
            return True
        if not usable:
            self.lose(found)
        return True

    def _read(self, number: int) -> Any:
        meta = self._store.read_meta(self.step, Found(self.step, number).part)
        if meta is None or Found(self.step, number) in self._used:
            return meta
        numbers = self._unnamed if meta.identity is None else self._of(meta.identity)
        numbers.append(number)
        self._unused[number] = numbers
        return meta

    def _of(self, identity: Identity) -> deque[int]:
        group = self._alike.setdefault(identity.prompts_hash, [])
        for alike in group:
            if alike.identity == identity:
                return alike.numbers
        group.append(_Alike(identity, deque()))
        return group[-1].numbers

    def _forget(self, number: int) -> None:
        """No call is to be served by this dump any more."""
        numbers = self._unused.pop(number, None)
        if numbers is not None:
            numbers.remove(number)


class OtherSteps:
    """The dumps of a run by their prompts: each step is read once, when it is first needed."""

    def __init__(self, store: StepStore) -> None:
        self._store = store
        self._read: set[int] = set()
        self._by_prompts: dict[str, list[Found]] = {}

    def find(self, prompts_hash: str, step: int) -> list[Found]:
        """The dumps with these prompts in other steps, the nearest first, as `repeat` prefers."""
        for other in self._store.listed():
            if other != step and other not in self._read:
                self._read_step(other)
        found = (one for one in self._by_prompts.get(prompts_hash, ()) if one.step != step)
        return sorted(found, key=lambda one: one.order(step))

    def forget(self, step: int) -> None:
        """Read `step` again: it has new dumps."""
        if step not in self._read:
            return
        self._read.discard(step)
        for some in self._by_prompts.values():
            some[:] = [one for one in some if one.step != step]

    def _read_step(self, step: int) -> None:
        self._read.add(step)
        for number in self._store.calls(step):
            found = Found(step, number)
            meta = self._store.read_meta(step, found.part)
            if meta is not None and meta.identity is not None and meta.identity.prompts_hash:
                self._by_prompts.setdefault(meta.identity.prompts_hash, []).append(found)
