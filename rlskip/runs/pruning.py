"""Old dumps: which of them limits choose, and their removal."""

from __future__ import annotations

import contextlib
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import attrs

from rlskip.runs.on_disk import families
from rlskip.runs.opened import Run
from rlskip.store import commit, retention
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
    steps = [one for run in runs for one in _steps_of(run)]
    chosen: dict[tuple[Path, str], Old] = {}

    def add(some: Iterable[Old], why: str) -> None:
        for one in some:
            chosen.setdefault((one.run.directory, one.name), attrs.evolve(one, why=why))

    if quarantined:
        add(_alone_in(runs, Run.quarantine), "quarantined")
    if older_than is not None:
        limit = time.time() - older_than
        journals = _alone_in(runs, Run.journals)
        add((one for one in steps + journals if one.written < limit), "too old")
    if keep_last is not None:
        for run in runs:
            mine = sorted((one for one in steps if one.run == run), key=lambda one: one.written)
            add(mine[: max(0, len(mine) - keep_last)], f"not among the last {keep_last}")
    return sorted(chosen.values(), key=lambda one: (one.run.name, one.written))


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
                    commit.remove(path, old.run.directory)
                else:
                    path.unlink()
    except OSError as error:
        return attrs.evolve(old, kept=f"it cannot be removed: {error.strerror or error}")
    return attrs.evolve(old, removed=really)


def _steps_of(run: Run) -> Iterator[Old]:
    """The steps of a run, each with all its dumps."""
    for step in run.steps():
        paths = [place.directory for place in families(run.directory).get(step, ())]
        yield from _measured(run, str(step), paths)


def _alone_in(runs: Sequence[Run], paths: Callable[[Run], list[Path]]) -> list[Old]:
    """Each of the `paths` of the runs."""
    return [
        old
        for run in runs
        for path in paths(run)
        for old in _measured(run, str(path.relative_to(run.directory)), [path])
    ]


def _measured(run: Run, name: str, paths: Sequence[Path]) -> Iterator[Old]:
    """What there is of these paths; nothing where all were removed meanwhile."""
    found = []
    for path in paths:
        # A live run may be removing it, or a file in it.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found += [file.lstat() for file in (path, *path.rglob("*"))]
    # What a directory holds counts, not the directory.
    files = [one for one in found if not stat.S_ISDIR(one.st_mode)]
    if found:
        when = max(one.st_mtime for one in files or found)
        yield Old(run, name, tuple(paths), sum(one.st_size for one in files), when)
