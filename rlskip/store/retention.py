"""How many steps to keep, and which ones living jobs are at, so that nobody removes those."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import attrs

from rlskip.jobs import alive
from rlskip.store import dump
from rlskip.store.layout import Place, as_step

logger = logging.getLogger(__name__)

_USES = {alive.LEASE: "a job generates it", "appending-": "a process appends to it"}


@attrs.define(eq=False)
class Retention:
    """Removes old dumps as new ones are written: all but those of the `keep_last` steps.

    The step just written and one that a living job generates are never removed. `families` gives
    the dumps of each step; it is not called again for the same step, which may have thousands of
    calls.
    """

    _keep_last: int = attrs.field(validator=attrs.validators.ge(1))
    _families: Callable[[], Mapping[int, Sequence[Place]]]
    # The steps that this process wrote, in order: the clock of a file system has coarse ticks.
    _order: dict[int, None] = attrs.field(factory=dict, init=False)

    def apply(self, written: Place) -> None:
        """Remove the oldest steps beyond the number; a failure is logged as a warning."""
        before = [*self._order]  # in one operation: other threads write, too
        self._order[written.step] = self._order.pop(written.step, None)
        if before[-1:] != [written.step]:
            try:
                self._remove(written)
            except Exception as error:  # the new dump is published: nothing may fail any more
                logger.warning("old dumps in %s cannot be removed: %s", written.root, error)

    def _remove(self, written: Place) -> None:
        families = self._families()
        ages = {step: age for step, of in [*families.items()] if (age := _written(of)) is not None}
        order = {step: nth for nth, step in enumerate([*self._order], 1) if step in ages}
        self._order = dict.fromkeys(order)
        # Who reads one meanwhile needs no mark: who has opened it reads it to the end, or is told
        # that it is gone (NFS), and who comes later finds none. A miss, never a part of one.
        spared = {*in_use(written.root), written.step}
        oldest = sorted((ages[step], order.get(step, 0), step) for step in ages.keys() - spared)
        for _, _, step in oldest[: max(0, len(ages) - self._keep_last)]:
            # The last calls first. Who is killed on the way leaves a step that lacks its last
            # calls, as one whose job was killed: the others still serve their calls.
            for place in reversed(families[step]):
                with contextlib.suppress(FileNotFoundError):  # another process was quicker
                    dump.remove(place.directory, place.root)
            logger.info("removed the dumps of step %d: keep_last=%d", step, self._keep_last)


def _written(places: Sequence[Place]) -> int | None:
    """When the last of these was written, in ns; None where none is there any more."""
    found = []
    for place in places:
        with contextlib.suppress(FileNotFoundError):
            found.append(os.lstat(place.directory).st_mtime_ns)
    return max(found, default=None)


def appending(root: Path, step: int) -> AbstractContextManager[None]:
    """Mark the step's journal as one that grows, where a mark can be written."""
    return alive.holding(root, f"appending-{step}")


def in_use(root: Path) -> dict[int, str]:
    """The steps that living jobs generate; raises OSError where that cannot be seen."""
    found: dict[int, str] = {}
    for label, _ in alive.held(root):
        for prefix in filter(label.startswith, _USES):
            step = as_step(label.removeprefix(prefix).partition("-")[0])
            if step is not None:
                found[step] = _USES[prefix]
    return found
