"""Old dumps: which of them limits choose, and their removal."""

from __future__ import annotations

import contextlib
import stat
import time
from collections.abc import Sequence
from pathlib import Path

import attrs

from rlskip.runs.on_disk import families
from rlskip.runs.opened import Run
from rlskip.store import dump, retention
from rlskip.store.layout import as_step, journaled_step


@attrs.frozen
class Old:
    """The dumps of a step, a journal, or what is quarantined: why it goes, or what keeps it.

    `size` is in bytes on disk, `written` in seconds since the epoch.
    """

    run: Run
    name: str
    paths: tuple[Path, ...] = attrs.field(repr=False)
    size: int
    written: float
    why: str = ""
    removed: bool = False
    kept: str | None = None


def choose(
    runs: Sequence[Run],
    *,
    keep_last: int | None = None,
    older_than: float | None = None,
    quarantined: bool = False,
) -> list[Old]:
    """The steps and journals that any of the limits selects, by run and age.

    `keep_last` steps of each run stay, the last written; `older_than` seconds is too old; and what
    is `quarantined` is chosen, too.
    """
    limit = 0.0 if older_than is None else time.time() - older_than
    chosen: list[Old] = []
    for run in runs:
        places = families(run.directory)
        paths = {str(step): [p.directory for p in places.get(step, ())] for step in run.steps()}
        steps = sorted(_measured(run, paths), key=lambda one: one.written)
        first = 0 if keep_last is None else len(steps) - keep_last
        journals = _measured(run, {path.name: [path] for path in run.journals()})
        bad = _measured(run, {path.name: [path] for path in run.quarantine() if quarantined})
        chosen += [attrs.evolve(o, why="too old") for o in (*steps, *journals) if o.written < limit]
        chosen += [
            attrs.evolve(one, why=f"not among the last {keep_last}")
            for one in steps[: max(0, first)]
            if one.written >= limit
        ]
        chosen += [attrs.evolve(one, why="quarantined") for one in bad]
    return sorted(chosen, key=lambda one: (one.run.name, one.written))


def remove(old: Old, *, really: bool) -> Old:
    """`old` as removed, or with the reason why it is kept; without `really` nothing is removed."""
    try:
        # Checked again for each step: a replay may have begun since.
        journaled = journaled_step(old.name)
        step = as_step(old.name) if journaled is None else journaled
        if step is not None and (does := retention.in_use(old.run.directory).get(step)):
            return attrs.evolve(old, kept=does)
        for path in reversed(old.paths) if really else ():  # as `remove_family` does
            with contextlib.suppress(FileNotFoundError):  # another process was quicker
                if path.is_dir():
                    dump.remove(path, old.run.directory)
                else:
                    path.unlink()
    except OSError as error:
        return attrs.evolve(old, kept=f"it cannot be removed: {error.strerror or error}")
    return attrs.evolve(old, removed=really)


def _measured(run: Run, named: dict[str, list[Path]]) -> list[Old]:
    """What there is at some paths, by name; nothing of what was removed meanwhile."""
    measured = []
    for name, paths in named.items():
        found = []
        for path in paths:
            # A live run may be removing it, or a file in it.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                found += [file.lstat() for file in (path, *path.rglob("*"))]
        # What a directory holds counts, not the directory.
        files = [one for one in found if not stat.S_ISDIR(one.st_mode)]
        if found:
            when = max(one.st_mtime for one in files or found)
            nbytes = sum(one.st_size for one in files)
            measured.append(Old(run, name, tuple(paths), nbytes, when))
    return measured
