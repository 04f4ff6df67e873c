"""The ledger of a run's directory: what has served, so that nothing serves twice.

Roles and dispatchers ask it before they serve a dump, a group of its rows or a journaled session,
and tell it afterwards, whoever of them it was. It lives from ``SkipManager.init`` to the next, or
to the end of the process: what a process generated it never resumes, and a sweep in one process, a
notebook's cell that is run twice, and each test of a suite begin with an empty one.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import attrs

logger = logging.getLogger(__name__)

_UNKNOWN = "?"


@attrs.define(eq=False)
class Ledger:
    """What has served in one directory. Hold `lock` from the look until it is told.

    ``served`` counts how often each dump, group of one, or prompt of a journal has served, and
    ``written`` has the dumps that this process has written, or is going to. ``journaled`` are the
    steps whose sessions are journaled here, or were. ``copies`` says how many prompts of each
    content each of the steps had that were submitted last: a prompt that comes again is another
    one, whose sessions are other draws. ``running`` are the calls whose stages run.
    """

    lock: threading.RLock = attrs.field(factory=threading.RLock)
    served: Counter[Hashable] = attrs.field(factory=Counter)
    written: set[Hashable] = attrs.field(factory=set)
    journaled: set[int] = attrs.field(factory=set)
    copies: dict[int, Counter[str]] = attrs.field(factory=dict)
    running: list[Enclosing] = attrs.field(factory=list)

    def callers(self, step: int) -> list[Enclosing]:
        """The call whose stage submits something now; all that it may be, where it is not known.

        In a thread that the stage handed it to (``run_in_executor`` gives it no context) it is the
        call of `step` that runs.
        """
        if (known := enclosing.get()).calls:
            return [known]
        return [one for one in [*self.running] if one.step == step]

    def serve(self, parts: Iterable[Hashable]) -> None:
        """These serve a call."""
        with self.lock:
            self.served.update(parts)

    def give_back(self, parts: Iterable[Hashable]) -> None:
        """They did not serve it after all: it failed, or they turned out to be unusable."""
        with self.lock:
            self.served.subtract(parts)

    def has_served(self, dump: Hashable, writes: Hashable = None) -> bool:
        """Whether its rollouts have reached the trainer: it has served, or was made of them.

        That the call which asks `writes` it itself does not count.
        """
        return self.served[dump] > 0 or (dump in self.written and dump != writes)

    def write(self, dump: Hashable) -> bool:
        """This process is going to write a dump; whether it is the first of that name.

        Said before the dump is there, as a thread may write it.
        """
        with self.lock:
            is_new = dump not in self.written
            self.written.add(dump)
            return is_new


@attrs.define(eq=False)
class Needs:
    """What a call of a stage needs of each session, as a dump must have it: its fields.

    A session is resumed if it lacks nothing else now than what was journaled with it: what the call
    that generated it needed, too, and did not get, generating again does not bring. ``lacks``
    returns of rows, as columns, the names that they lack; None: any rows will do. Unless of all
    sessions that were resumed ``is_told`` what they lack, what the result lacks may be their lack,
    which is not recorded as the stage's own.
    """

    lacks: Callable[[Any], Sequence[str]] | None = None
    is_told: bool = True

    def lacking(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """What a session's rows lack; a name that is none where that cannot be told of them."""
        if self.lacks is None:
            return []
        names = dict.fromkeys(name for row in rows for name in row)
        try:
            # Of a field that some rows lack the batch would have none.
            held = [name for name in names if all(name in row for row in rows)]
            return list(self.lacks({name: [row[name] for row in rows] for name in held}))
        except Exception as error:  # it may expect what only the whole stage returns
            logger.debug("rlskip: it cannot be told what a session lacks: %s", error)
            return [_UNKNOWN]

    def why_not(self, rows: Sequence[Mapping[str, Any]], then: Sequence[str]) -> str | None:
        """Why a session that lacked this `then` is not resumed; None if it is."""
        now = self.lacking(rows)
        lacking = [name for name in now if name not in then]
        if not lacking:
            self.is_told = self.is_told and _UNKNOWN not in now
            return None
        if lacking == [_UNKNOWN]:
            return "the function `lacks` of the stage cannot tell whether they lack a field"
        return f"they lack what this run needs: {', '.join(lacking)}"


@attrs.frozen(eq=False)
class Enclosing:
    """The call of a stage, of a `step`, that encloses some code, and what it ``needs``.

    ``calls`` are it and the calls that enclose it: by role, the name of the call among the step's,
    which is the same in every run. Role ``rollout_tq`` tells its calls apart by their prompts, and
    names one by its arguments alone; empty without any. A stage that calls its own role again (its
    base class's function, say) is one call, and a dispatcher in a stage tells by the names which
    call submits a prompt.
    """

    step: int
    calls: Mapping[str, str]
    needs: Needs


_NOTHING = Enclosing(-1, {}, Needs())
enclosing: ContextVar[Enclosing] = ContextVar("rlskip_enclosing", default=_NOTHING)
"""What encloses the present code."""


_ledgers: dict[str, Ledger] = {}


def ledger_of(directory: Path) -> Ledger:
    # One operation: of two roles that ask at once none gets a ledger of its own. A directory has
    # one, whatever links lead there.
    return _ledgers.setdefault(os.path.realpath(directory), Ledger())


def forget_served() -> None:
    """Another run starts in this process: nothing has served it yet."""
    _ledgers.clear()
