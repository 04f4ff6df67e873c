"""How many steps to keep, and which ones living jobs are at, so that nobody removes those."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from rlskip.jobs import alive
from rlskip.store import commit
from rlskip.store.layout import Place, as_step

logger = logging.getLogger(__name__)

_APPENDING = "appending-"


class Retention:
    """Removes old dumps as new ones are written: all but those of the `keep_last` steps.

    The step just written and one that a living job generates are never removed.
    """

    def __init__(self, root: Path, keep_last: int) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last={keep_last}: at least 1, or None for all")
        self._root = root
        self._keep_last = keep_last
        # When each step was written last, in ns since the epoch, as this process saw it first or
        # wrote it since. A step that is gone is dropped at the next save.
        self._known: dict[int, int] = {}

    def apply(self, families: Callable[[], Mapping[int, list[Place]]], written: Place) -> None:
        """Remove the oldest steps beyond the number; a failure is logged as a warning.

        `families` gives the dumps of each step; it is not called for a step that is known, because
        a step may have thousands of calls.
        """
        if written.step in self._known:
            self._known[written.step] = time.time_ns()
            return
        try:
            self._remove(families(), written.step)
        except Exception as error:  # the new dump is published: nothing may fail any more
            logger.warning("old dumps in %s cannot be removed: %s", self._root, error)

    def _remove(self, families: Mapping[int, list[Place]], just_written: int) -> None:
        present = {step: self._known.get(step) or _written(of) for step, of in families.items()}
        self._known = {step: when for step, when in present.items() if when is not None}
        # Who reads one meanwhile needs no mark: who has opened it reads it to the end, or is told
        # that it is gone (NFS), and who comes later finds none. A miss, never a part of one.
        spared = {*in_use(self._root), just_written}
        for step in sorted(self._known, key=self._known.__getitem__):
            if len(self._known) <= self._keep_last:
                break
            if step not in spared:
                del self._known[step]
                remove_family(families[step])
                logger.info("removed the dumps of step %d: keep_last=%d", step, self._keep_last)


def remove_family(places: Sequence[Place]) -> None:
    """Remove the dumps of a step, the last calls first.

    Who is killed on the way leaves a step that lacks its last calls, as one whose job was killed:
    the others still serve the calls that they were made for.
    """
    for place in reversed(places):
        with contextlib.suppress(FileNotFoundError):  # another process was quicker
            commit.remove(place.directory, place.root)


def _written(places: Sequence[Place]) -> int | None:
    """When the last of these was written; None where none is there any more."""
    found = []
    for place in places:
        with contextlib.suppress(FileNotFoundError):
            found.append(os.lstat(place.directory).st_mtime_ns)
    return max(found, default=None)


def appending(root: Path, step: int) -> AbstractContextManager[None]:
    """Mark the step's journal as one that grows, where a mark can be written."""
    return alive.holding(root, f"{_APPENDING}{step}")


def in_use(root: Path) -> dict[int, str]:
    """The steps that living jobs generate; raises OSError where that cannot be seen."""
    uses = {alive.LEASE: "a job generates it", _APPENDING: "a process appends to it"}
    found: dict[int, str] = {}
    for label, _ in alive.held(root):
        for prefix in filter(label.startswith, uses):
            step = as_step(label.removeprefix(prefix).partition("-")[0])
            if step is not None:
                found[step] = uses[prefix]
    return found
