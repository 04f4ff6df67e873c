"""How many steps to keep: those written last, up to a number and a size."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

import attrs

from rlskip.store import commit
from rlskip.store.layout import has_dump

logger = logging.getLogger(__name__)


@attrs.frozen
class Written:
    """When a step or a journal was written last, in ns since the epoch, and its size in bytes."""

    when: int
    size: int

    @classmethod
    def of(cls, path: Path) -> Written | None:
        """A file, or the files below a directory; None where there is nothing (any more).

        Raises
        ------
        OSError
            It cannot be read.
        """
        files = [os.fspath(path)]
        for above, _, names in os.walk(path, onerror=_raise_unless_gone):
            files += [os.path.join(above, name) for name in names]
        found = []
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                found.append(os.lstat(file))
        if len(found) > 1 and stat.S_ISDIR(found[0].st_mode):
            del found[0]  # what it holds counts, not the directory
        if not found:
            return None
        return cls(max(f.st_mtime_ns for f in found), sum(f.st_size for f in found))


class Retention:
    """Removes old dumps as new ones are written.

    The step just written and one that is being read are never removed, whatever the limits.

    Parameters
    ----------
    keep_last
        How many steps to keep, each with all its calls: those written last; None for all.
    max_size
        Bytes that the dumps may take together; None for any number.
    """

    def __init__(self, root: Path, keep_last: int | None, max_size: int | None) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last={keep_last}: at least 1, or None for all")
        if max_size is not None and max_size < 0:
            raise ValueError(f"max_size={max_size}: bytes, or None for any")
        self._root = root
        self._keep_last = keep_last
        self._max_size = max_size
        # What each step takes, as measured when this process saw it first, plus the calls that it
        # wrote since. A step that is gone is dropped at the next save.
        self._known: dict[int, Written] = {}

    def apply(
        self, steps: Callable[[], list[int]], just_written: int, later_call: int | None
    ) -> None:
        """Remove what exceeds the limits of `steps`; a failure is logged as a warning.

        `later_call` is the size of what was written, in bytes, if a step was added to: it is not
        measured as a whole again after each of many calls.
        """
        if self._keep_last is None and self._max_size is None:
            return
        try:
            removed = self._remove(steps(), just_written, later_call)
        except Exception as error:  # the new dump is published: nothing may fail any more
            logger.warning("old dumps in %s cannot be removed: %s", self._root, error)
        else:
            if removed:
                logger.info("removed the dumps of steps %s to stay within limits", removed)

    def forget(self, step: int) -> None:
        """Measure a step again, because something of it was quarantined."""
        self._known.pop(step, None)

    def _remove(self, steps: list[int], just_written: int, later_call: int | None) -> list[int]:
        known = self._known.pop(just_written, None)
        if known is not None and later_call is not None:
            now = os.stat(self._root / str(just_written)).st_mtime_ns
            self._known[just_written] = Written(now, known.size + later_call)
        present = {step: self._known.get(step) or self._measured(step) for step in steps}
        self._known = {step: written for step, written in present.items() if written is not None}
        spared = commit.being_read(self._root) | {just_written}
        count, size = len(self._known), sum(written.size for written in self._known.values())
        removed = []
        for step in sorted(self._known, key=lambda step: self._known[step].when):
            too_many = self._keep_last is not None and count > self._keep_last
            too_big = self._max_size is not None and size > self._max_size
            if not (too_many or too_big):
                break
            if step in spared:
                continue
            written = self._known.pop(step)
            count, size = count - 1, size - written.size
            with contextlib.suppress(FileNotFoundError):  # another process was quicker
                commit.remove(self._root / str(step), self._root)
                removed.append(step)
        return removed

    def _measured(self, step: int) -> Written | None:
        """None without a dump: all of it may be quarantined, or about to be written."""
        return Written.of(self._root / str(step)) if has_dump(self._root, step) else None


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
