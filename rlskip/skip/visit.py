"""The dumps of the step at which the loop is: which have served a call, which number is free.

A stage may be called several times in a step. Each dump then serves one call, in the order in which
the calls were made. The step's directory is listed once, and each ``meta.json`` is read when a call
first needs it, so that a call costs the same in a step of 10 000.
"""

from __future__ import annotations

import bisect
import contextlib
import enum
import logging
import threading
from collections import Counter, deque
from collections.abc import Iterator

import attrs

from rlskip.jobs.records import DumpedCalls
from rlskip.skip.traces import Traces
from rlskip.store import DumpError, DumpMeta, Identity, StepStore

log = logging.getLogger(__name__)


@attrs.frozen
class Found:
    """The dump of call `number` of `step`; of a step of a queue, its part of that number.

    ``size`` is the directory of its run, if that has another number of prompts a step.
    """

    step: int
    number: int = 0
    size: str = ""

    @property
    def path(self) -> str:
        """Below the run's directory."""
        return f"{self.step}/{self.number}" if self.number else str(self.step)

    @property
    def part(self) -> int | None:
        """The part of the step in the store: the first call is the step's own dump."""
        return self.number or None

    def order(self, step: int) -> tuple[int, int]:
        """By what it is preferred as a substitute at `step`, as `StepStore.nearest` has it."""
        below = self.step <= step
        return (step - self.step if below else (1 << 62) + self.step), self.number

    def order_from(self, first: int) -> tuple[bool, str, int, int]:
        """By what prompts prefer it in a process that began at step `first`."""
        return self.step < first, self.size, self.step, self.number

    def __str__(self) -> str:
        return f"step {self.step}" + (f", call {self.number}" if self.number else "")


class State(enum.Enum):
    """What is known of a number of the step."""

    UNREAD = "its dump was there when the visit began, and was not read so far"
    OPEN = "its dump was read, and may serve a call"
    USED = "its dump has served a call"
    UNREADABLE = "its dump cannot be read at the moment, and stays where it is"
    LOST = "its dump turned out to be unusable: the number is free"
    RESERVED = "a call of this visit is being generated for it"
    WRITTEN = "this visit has written its dump, which serves no other call"


# In a step of more calls than these its directory is not listed for each call that is generated.
_MAX_LISTED = 256
_USABLE = (State.UNREAD, State.OPEN, State.USED)


@attrs.define(eq=False)
class Alike:
    """The numbers of the open dumps of one identity; None: they record none."""

    identity: Identity | None
    numbers: deque[int] = attrs.field(factory=deque)


@attrs.define(eq=False)
class Slot:
    """A number of the step; `alike` are the dumps of its identity, once it was read."""

    state: State
    alike: Alike | None = None


class Visit:
    """The dumps of `step`. Hold `lock` from choosing a dump until :meth:`take`.

    Parameters
    ----------
    dumped
        The records of the run; None: there are none.

    Attributes
    ----------
    calls
        How many calls were served, or are generated.
    listed
        The numbers of the dumps that this visit did not write first, ascending. One of them that
        was lost stays: the places of the others do not change.
    slots
        What is known of each number; one that is not in it is free.
    traces
        What its dumps that were read tell of how many calls it had.
    """

    # Always, while `lock` is not held:
    # - every listed number has a slot; a slot that is not listed is RESERVED, WRITTEN or LOST;
    # - a number is in its slot's `alike.numbers` if and only if the slot is OPEN, and in no other;
    # - every UNREAD number is in `_unread`, which is ascending;
    # - no number below `_low` is free;
    # - `_states` counts the slots by their state.

    def __init__(self, store: StepStore, step: int, dumped: DumpedCalls | None = None) -> None:
        self.lock = threading.RLock()
        self.step = step
        self.calls = 0
        self.listed = store.calls(step)
        self.slots = {number: Slot(State.UNREAD) for number in self.listed}
        self._store = store
        self._unread = deque(self.listed)
        self._by_prompts: dict[str | None, list[Alike]] = {}
        self._unnamed = Alike(None)
        self._counted: Counter[str] = Counter()
        self._used_elsewhere: set[Found] = set()
        self._low = 0
        # Of the reserved numbers those whose dumps are being written, each with what it is for.
        self._saving: dict[int, Identity] = {}
        self._states = Counter({State.UNREAD: len(self.listed)})
        # Calls that began and are not dumped: those that still run, and by what is compared of
        # them those that failed.
        self._under_way: dict[object, str] = {}
        self._failed: Counter[str] = Counter()
        self._dumped, self.traces = dumped, Traces()

    # -- which dumps there are, and which fit --------------------------------------------

    def is_usable(self, number: int) -> bool:
        """Whether the dump of a listed number may be loaded."""
        return self.slots[number].state in _USABLE

    @property
    def is_empty(self) -> bool:
        """Whether the step has no dump but those that this visit wrote."""
        return not self._usable()

    @property
    def is_damaged(self) -> bool:
        """Whether a dump is missing: it may have been that of a call that fits none."""
        highest, usable = self.listed[-1] if self.listed else -1, self._usable()
        return usable <= highest or usable < self.traces.calls(self.step, self._dumped)

    def _usable(self) -> int:
        return sum(self._states[state] for state in _USABLE)

    def kth(self, place: int) -> Found | None:
        """The dump of that place in the step; None if there is none, or it is lost."""
        if place >= len(self.listed) or not self.is_usable(self.listed[place]):
            return None
        return Found(self.step, self.listed[place])

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

    def unnamed(self) -> Iterator[Found]:
        """The dumps of this step that record no identity, as far as they were read."""
        yield from (Found(self.step, number) for number in list(self._unnamed.numbers))

    def _lowest(self, identity: Identity, given: set[int]) -> int | None:
        fits = [
            next((n for n in alike.numbers if n not in given), None)
            for alike in self._by_prompts.get(identity.prompts, ())
            if alike.identity is not None and not identity.differences(alike.identity)[0]
        ]
        return min((n for n in fits if n is not None), default=None)

    def nearest(self, identity: Identity) -> tuple[Found, list[str]] | None:
        """The dump that differs least from a call that none fits, and in what."""
        differing = [
            (identity.differences(alike.identity)[0], alike.numbers[0])
            for group in self._by_prompts.values()
            for alike in group
            if alike.identity is not None and alike.numbers
        ]
        if not differing:
            return None
        must, number = min(differing, key=lambda one: (len(one[0]), one[1]))
        return Found(self.step, number), must

    def why_not(self, identity: Identity) -> str:
        """Why no dump serves a call, without looking at all of them."""
        same_prompts = self._by_prompts.get(identity.prompts, ())
        differing = [identity.differences(one.identity)[0] for one in same_prompts if one.identity]
        if not all(differing):
            return "its dumps have served other calls"
        if differing:
            least = min(differing, key=len)
            return "; ".join(least)
        others = (
            "a dump of the step is missing, no other" if self.is_damaged else "no dump of the step"
        )
        return f"{others} has its prompts"

    # -- what becomes of a call ----------------------------------------------------------

    def count_call(self, identity: Identity) -> str:
        """Count a call that is served or generated; its name among the step's, in every job."""
        digest = identity.compared_digest()
        self.calls += 1
        self._counted[digest] += 1
        return f"{digest}-{self._counted[digest] - 1}"

    def begin(self, call: object, identity: Identity) -> None:
        """A call is going to be generated; a repetition of one that failed replaces it."""
        with self.lock:
            digest = self._under_way[call] = identity.compared_digest()
            self._failed[digest] -= self._failed[digest] > 0

    def end(self, call: object, dumped: bool) -> None:
        """It ended. One that was not dumped may be made again in a later run."""
        with self.lock:
            digest = self._under_way.pop(call, None)
            if digest is not None and not dumped:
                self._failed[digest] += 1

    def known_calls(self) -> int:
        """How many calls the step has: those with a dump, and those that began without one."""
        with self.lock:
            dumped = self._states.total() - self._states[State.LOST] - self._states[State.RESERVED]
            return dumped + len(self._under_way) + self._failed.total()

    def take(self, found: Found) -> None:
        """This dump serves a call, and no other one."""
        if found.step == self.step:
            self._become(found.number, State.USED)
        else:
            self._used_elsewhere.add(found)

    def give_back(self, found: Found) -> None:
        """The call that this dump served has failed: the dump may serve another one."""
        with self.lock:
            if found.step != self.step:
                self._used_elsewhere.discard(found)
                return
            alike = self.slots[found.number].alike
            self._become(found.number, State.UNREAD if alike is None else State.OPEN)
            waiting = self._unread if alike is None else alike.numbers
            if found.number not in waiting:
                bisect.insort(waiting, found.number)

    def is_used(self, found: Found) -> bool:
        """Whether a dump of another step has served a call."""
        return found in self._used_elsewhere

    def lose(self, found: Found) -> None:
        """A dump turned out to be unusable: its number is free."""
        with self.lock:
            if found.step == self.step:
                self._become(found.number, State.LOST)
                self._low = min(self._low, found.number)

    # -- numbers of new dumps ------------------------------------------------------------

    def next_number(self) -> int:
        """The lowest number that no dump has or will have."""
        with self.lock:
            while not self._is_free(self._low):
                self._low += 1
            return self._low

    def reserve(self, at_least: int = 0) -> int:
        """The lowest number that is free; nobody else in this visit gets it."""
        with self.lock:
            number = max(self.next_number(), at_least)
            while not self._is_free(number):
                number += 1
            self._become(number, State.RESERVED)
            return number

    def saves(self, number: int, identity: Identity) -> None:
        """The dump of a reserved number is going to be written, unless another job is quicker."""
        with self.lock:
            self._saving[number] = identity

    def release(self, number: int) -> None:
        """Give a number back, unless a dump has it meanwhile."""
        with self.lock:
            if self.slots[number].state is State.RESERVED:
                self._become(number, State.LOST)
                self._low = min(self._low, number)

    def wrote(self, call: object, number: int) -> None:
        """This visit has written the dump of a call, which ends with it."""
        with self.lock:  # at once: the dump and the call are one call of the step
            self._become(number, State.WRITTEN)
            self.end(call, dumped=True)

    def refresh(self, everything: bool = True) -> None:
        """Find what other jobs have added to the step since.

        They take the lowest numbers that are free for them, and this visit may have reserved these.
        In a large step only the next ones are looked at, unless `everything` is.
        """
        with self.lock, contextlib.suppress(DumpError, OSError, MemoryError):
            if everything or len(self.slots) <= _MAX_LISTED:
                for number in self._store.calls(self.step):
                    if self._is_free(number) or self.slots[number].state is State.RESERVED:
                        self._find(number)
            while self._find(self.next_number()):
                pass

    def _find(self, number: int) -> bool:
        """Whether another job has written a dump of this number, which may serve a call."""
        meta = self._store.read_meta(self.step, Found(self.step, number).part)
        if meta is None:
            return False
        if (mine := self._saving.get(number)) is not None and (
            meta.identity is None or not mine.differences(meta.identity)[0]
        ):
            return False  # it is this visit's own
        self.add(number, meta)
        return True

    def add(self, number: int, meta: DumpMeta) -> None:
        """Another job has written this dump of another call: it may serve one of this visit."""
        with self.lock:
            if self._is_free(number) or self.slots[number].state is State.RESERVED:
                self.mark_present(number)
                self._open(number, meta)

    def mark_present(self, number: int) -> None:
        """Another job has written this dump; it serves no call that this visit generates."""
        with self.lock:
            self._become(number, State.USED)
            if number not in self.listed:
                bisect.insort(self.listed, number)

    # -- within --------------------------------------------------------------------------

    def _is_free(self, number: int) -> bool:
        return number not in self.slots or self.slots[number].state is State.LOST

    def _become(self, number: int, state: State) -> None:
        """Give a number its state. An open one is offered no longer."""
        slot = self.slots.get(number)
        if slot is None:
            slot = self.slots[number] = Slot(state)
        else:
            self._states[slot.state] -= 1
            if slot.state is State.OPEN and slot.alike is not None:
                slot.alike.numbers.remove(number)
        slot.state = state
        self._states[state] += 1
        self._saving.pop(number, None)

    def _read_next(self) -> bool:
        """Read one more of the listed dumps; False after the last one."""
        if not self._unread:
            return False
        number = self._unread.popleft()
        if self.slots[number].state is not State.UNREAD:
            return True
        found = Found(self.step, number)
        try:
            meta = self._store.read_meta(self.step, found.part)
        except (DumpError, OSError, MemoryError) as error:
            log.warning("rlskip: %s counts as a miss: %s", found, error)
            self._become(number, State.UNREADABLE)
            return True
        if meta is None:
            self.lose(found)
        else:
            self._open(number, meta)
        return True

    def _open(self, number: int, meta: DumpMeta) -> None:
        self._become(number, State.OPEN)
        slot, identity = self.slots[number], meta.identity
        slot.alike = self._unnamed
        if identity is not None:
            group = self._by_prompts.setdefault(identity.prompts, [])
            slot.alike = next((alike for alike in group if alike.identity == identity), None)
            if slot.alike is None:
                slot.alike = Alike(identity)
                group.append(slot.alike)
        slot.alike.numbers.append(number)
        self.traces.add(meta)
