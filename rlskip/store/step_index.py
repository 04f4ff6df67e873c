"""Which steps a directory holds, without listing it each time."""

from __future__ import annotations

import bisect
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlskip.store.layout import steps_among

_TICK_S = 1.0
"""A directory changed again within a clock tick of being listed may show no newer time."""


class StepIndex:
    """The integer names in `root`, ascending; listed again only when the directory has changed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        # Both under the lock. While the directory's mtime, in ns, is `_seen`, it holds exactly
        # `_steps`; with None that is not known. Callers hold the list, so it is never changed.
        self._steps: list[int] = []
        self._seen: int | None = None

    def steps(self) -> list[int]:
        """A list that is never changed afterwards; raises OSError where it cannot be listed."""
        with self._lock:
            changed = self.changed_at()
            if changed is None or changed != self._seen:
                try:
                    self._steps = steps_among(os.listdir(self._root))
                except FileNotFoundError:
                    return []
                settled = changed is not None and time.time() - changed / 1e9 > _TICK_S
                self._seen = changed if settled else None
            return self._steps

    def changed_at(self) -> int | None:
        """When the directory changed last, by its own clock, in ns; None where unknown."""
        try:
            return os.stat(self._root).st_mtime_ns
        except OSError:
            return None

    def added(self, step: int, before: int | None) -> None:
        """Note that this process published `step`; `before` is :meth:`changed_at` just before.

        That needs no listing, unless others were here since the last one. A step that another
        process adds in the very same moment is found with the directory's next change: only
        `repeat`, which takes the nearest of many, can miss it until then.
        """
        with self._lock:
            if before is None or before != self._seen:
                self._seen = None
                return
            at = bisect.bisect_left(self._steps, step)
            if self._steps[at : at + 1] != [step]:
                self._steps = [*self._steps[:at], step, *self._steps[at:]]
            self._seen = self.changed_at()


def by_preference(steps: Sequence[int], step: int) -> Iterator[int]:
    """`steps` in the order in which `repeat` prefers them as a substitute for `step`.

    `step` itself, then the lower ones from the nearest down, then the higher ones up.
    """
    at = bisect.bisect_right(steps, step)
    yield from (steps[i] for i in range(at - 1, -1, -1))
    yield from (steps[i] for i in range(at, len(steps)))
