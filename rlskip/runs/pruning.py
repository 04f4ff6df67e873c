"""Old dumps: which of them limits choose, and their removal."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import attrs

from rlskip.runs.on_disk import families
from rlskip.runs.opened import Run
from rlskip.store import commit
from rlskip.store.layout import as_step, journaled_step


@attrs.frozen
class _Written:
    """When a step or a journal was written last, in ns since the epoch, and its size in bytes."""

    when: int
    size: int

    @classmethod
    def of(cls, path: Path) -> _Written | None:
        """A file, or the files below a directory; None where there is nothing (any more)."""
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

    Parameters
    ----------
    keep_last
        Steps to keep in each run, the last written.
    older_than
        Seconds: what was written longer ago is chosen.
    quarantined
        Also what is quarantined.
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
        if step is not None and (does := commit.in_use(old.run.directory).get(step)):
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
    found = [written for path in paths if (written := _Written.of(path)) is not None]
    if found:
        size, when = sum(one.size for one in found), max(one.when for one in found)
        yield Old(run, name, tuple(paths), size, when / 1e9)


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
