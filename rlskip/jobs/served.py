"""The ledger of a run's directory: what has served, so that nothing serves twice.

Roles and dispatchers ask it before they serve a dump, a group of its rows or a journaled session,
and tell it afterwards, whoever of them it was. It lives from ``SkipManager.init`` to the next, or
to the end of the process: what a process generated it never resumes, and a sweep in one process, a
notebook's cell that is run twice, and each test of a suite begin anew.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable
from pathlib import Path

import attrs


@attrs.define(eq=False)
class Ledger:
    """What has served in one directory. Hold `lock` from the look until it is told.

    Attributes
    ----------
    steps
        Of each dump, or group of one, that has served a call, the step of the first.
    uses
        How often each group has served.
    written
        The dumps that this process wrote, or is going to write.
    journaled
        The steps whose sessions are journaled here, or were.
    copies
        How many prompts of each content each of the steps had that were submitted last: a prompt
        that comes again is another one, whose sessions are other draws.
    """

    lock: threading.RLock = attrs.field(factory=threading.RLock)
    steps: dict[Hashable, int] = attrs.field(factory=dict)
    uses: Counter[Hashable] = attrs.field(factory=Counter)
    written: set[Hashable] = attrs.field(factory=set)
    journaled: set[int] = attrs.field(factory=set)
    copies: dict[int, Counter[str]] = attrs.field(factory=dict)


_ledgers: dict[Path, Ledger] = {}


def ledger_of(directory: Path) -> Ledger:
    """The ledger of a run's directory."""
    return _ledgers.setdefault(Path(directory).absolute(), Ledger())


def forget_served() -> None:
    """Begin anew: another run starts in this process."""
    _ledgers.clear()
