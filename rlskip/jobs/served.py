"""The ledger of a run's directory: what has served, so that nothing serves twice.

Roles and dispatchers ask it before they serve a dump, a group of its rows or a journaled session,
and tell it afterwards, whoever of them it was. It lives from ``SkipManager.init`` to the next, or
to the end of the process: what a process generated it never resumes, and a sweep in one process, a
notebook's cell that is run twice, and each test of a suite begin anew.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Iterable
from pathlib import Path

import attrs


@attrs.define(eq=False)
class Ledger:
    """What has served in one directory. Hold `lock` from the look until it is told.

    Attributes
    ----------
    journaled
        The steps whose sessions are journaled here, or were.
    copies
        How many prompts of each content each of the steps had that were submitted last: a prompt
        that comes again is another one, whose sessions are other draws.
    """

    lock: threading.RLock = attrs.field(factory=threading.RLock)
    journaled: set[int] = attrs.field(factory=set)
    copies: dict[int, Counter[str]] = attrs.field(factory=dict)
    # How often each dump, or group of one, has served.
    _served: Counter[Hashable] = attrs.field(factory=Counter)
    _written: set[Hashable] = attrs.field(factory=set)

    def serve(self, parts: Iterable[Hashable]) -> None:
        """These serve a call."""
        with self.lock:
            self._served.update(parts)

    def give_back(self, parts: Iterable[Hashable]) -> None:
        """They did not serve it after all: it failed, or they turned out to be unusable."""
        with self.lock:
            self._served.subtract(parts)

    def uses(self, part: Hashable) -> int:
        """How often it has served."""
        return self._served[part]

    def has_served(self, dump: Hashable, writes: Hashable = None) -> bool:
        """Whether its rollouts have reached the trainer: it has served, or was made of them.

        That the call which asks `writes` it itself does not count.
        """
        return self._served[dump] > 0 or (dump in self._written and dump != writes)

    def write(self, dump: Hashable) -> bool:
        """This process is going to write a dump: before it is there, as a thread may write it.

        Returns whether it is the first of that name.
        """
        with self.lock:
            is_new = dump not in self._written
            self._written.add(dump)
            return is_new

    def write_not(self, dump: Hashable) -> None:
        """Another job was quicker to write a dump of that name."""
        with self.lock:
            self._written.discard(dump)

    def has_written(self, dump: Hashable) -> bool:
        """Whether this process has written a dump, or is going to."""
        return dump in self._written


_ledgers: dict[Path, Ledger] = {}


def ledger_of(directory: Path) -> Ledger:
    """The ledger of a run's directory."""
    return _ledgers.setdefault(Path(directory).absolute(), Ledger())


def forget_served() -> None:
    """Begin anew: another run starts in this process."""
    _ledgers.clear()
