"""What lies on disk: runs, their dumps, and which of them a user named.

Only looking: nothing corrupt is set aside here, as a trainer's store does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from rlskip.config.skip import DEFAULT_DUMP_DIR
from rlskip.errors import RlskipError
from rlskip.skip.records import FOLDER
from rlskip.store import AbsentDumpError, DumpError, DumpMeta
from rlskip.store import commit as marks
from rlskip.store.dump import is_complete, open_dump, read_meta, rebuild
from rlskip.store.layout import Place, as_step

_SHARD = re.compile(r"gen_batch\.r(\d+)-of-(\d+)\.dp")
_BAD = re.compile(r"\d+\.bad-.*")


class NoSuchPlaceError(RlskipError, FileNotFoundError):
    """What a command was pointed at is not there."""


@attrs.frozen
class Dump:
    """One file of rollouts: a step's, a mini-batch's, or a rank's shard.

    ``meta`` is None where it cannot be read, and then ``problem`` says why. ``written`` is in
    seconds since the epoch, by the file system's clock; ``size`` in bytes on disk.
    """

    place: Place
    meta: DumpMeta | None
    problem: str | None
    written: float
    size: int

    @property
    def step(self) -> int:
        return self.place.step

    @property
    def name(self) -> str:
        """As a user would name it: ``3``, ``3/0``, ``3 (rank 0 of 2)``."""
        name = "/".join(self.place.parts)
        ranks = self.place.world_size
        return name if ranks == 1 else f"{name} (rank {self.place.rank} of {ranks})"

    def load(self, part: str = "rollouts") -> Any:
        """The rollouts, every byte verified; a DataProto comes as its parts, without verl.

        Raises
        ------
        DumpError
            It cannot be used here; it stays where it is.
        """
        with (
            marks.reading(self.place.root, self.step),
            self.place.opened() as here,
            open_dump(here) as (reader, _),
        ):
            value = rebuild(reader, part, None, host_classes=False)
            reader.verify()
            return value

    def verify(self) -> None:
        """Compare every byte with its checksum; raises as :meth:`load`."""
        with self.place.opened() as here:
            if not is_complete(here):
                raise AbsentDumpError(
                    "shards of other ranks are missing, or of another call",
                    str(here.place.directory),
                )
            with open_dump(here) as (reader, _):
                reader.verify()


@attrs.frozen
class Run:
    """The directory of one run's dumps."""

    directory: Path

    @property
    def dump_dir(self) -> Path:
        return self.directory.parent.parent

    @property
    def name(self) -> str:
        return "/".join(self.directory.parts[-2:])

    def steps(self) -> list[int]:
        """The steps that there is anything of, ascending."""
        found = (as_step(entry.name) for entry in _folders(self.directory))
        return sorted(step for step in found if step is not None)

    def dumps(self, step: int | None = None, inner: int | None = None) -> list[Dump]:
        """All of them, or those of one step, or of one of its mini-batches; in order."""
        steps = self.steps() if step is None else [step]
        return [
            dump
            for number in steps
            for dump in self._of(number)
            if inner is None or dump.place.inner == inner
        ]

    def set_aside(self) -> list[Path]:
        """Bad dumps that were kept under another name."""
        return [p for p in _folders(self.directory) if _BAD.fullmatch(p.name)]

    def _of(self, step: int) -> Iterator[Dump]:
        folder = self.directory / str(step)
        yield from _in(folder, Place(self.directory, step))
        inner = (as_step(entry.name) for entry in _folders(folder))
        for number in sorted(n for n in inner if n is not None):
            yield from _in(folder / str(number), Place(self.directory, step, number))


def _in(folder: Path, place: Place) -> Iterator[Dump]:
    """The dumps whose files lie directly in `folder`."""
    if not folder.is_dir() or folder.is_symlink():
        return
    names = sorted(os.listdir(folder))
    shards = [match for name in names if (match := _SHARD.fullmatch(name))]
    places = [attrs.evolve(place, rank=int(m[1]), world_size=int(m[2])) for m in shards]
    if {place.dump, place.meta} & set(names):
        places.insert(0, place)
    for one in places:
        try:
            with one.opened() as here:
                yield _look(one, read_meta(here), None)
        except (DumpError, OSError) as error:
            reason = error.what if isinstance(error, DumpError) else str(error)
            yield _look(one, None, reason)


def _look(place: Place, meta: DumpMeta | None, problem: str | None) -> Dump:
    written, nbytes = 0.0, 0
    for name in (place.dump, place.meta):
        try:
            found = os.lstat(place.directory / name)
        except FileNotFoundError:
            continue
        written, nbytes = max(written, found.st_mtime), nbytes + found.st_size
    return Dump(place, meta, problem, written, nbytes)


# -- what a user names -------------------------------------------------------------------


@attrs.frozen
class Target:
    """A run, a step of it, or a mini-batch of that."""

    run: Run
    step: int | None = None
    inner: int | None = None

    @property
    def name(self) -> str:
        numbers = [str(n) for n in (self.step, self.inner) if n is not None]
        return "/".join([self.run.name, *numbers])

    def dumps(self) -> list[Dump]:
        """What it holds; raises where a step was named that has no dump."""
        found = self.run.dumps(self.step, self.inner)
        if not found and self.step is not None:
            steps = self.run.steps()
            there = f"there are {compact(steps)}" if steps else "it has none at all"
            raise NoSuchPlaceError("no dump of this step", self.name, there)
        return found


def find_runs(where: Path) -> list[Run]:
    """The runs at or below a directory: a dump_dir, an experiment's, or a run's own."""
    if not where.is_dir():
        raise NoSuchPlaceError(
            "no such directory", str(where), "name the skip.dump_dir of the job, or a run in it"
        )
    if _is_run(where):
        return [Run(where)]
    # {dump_dir}/{experiment}_{project}/{shape}: two levels, and nothing below a run.
    below = [path for path in _folders(where) if path.name != FOLDER]
    runs = [path for path in below if _is_run(path)]
    runs += [p for path in below if path not in runs for p in _folders(path) if _is_run(p)]
    return [Run(path) for path in sorted(runs)]


def find_target(name: str, within: Path) -> Target:
    """What ``3``, ``3/0`` or a path stands for; numbers are steps of the one run in `within`.

    Raises
    ------
    NoSuchPlaceError
        Nothing is there, or a number could be a step of several runs.
    """
    numbers = [as_step(part) for part in name.split("/")]
    if len(numbers) <= 2 and None not in numbers:
        return Target(the_run(within), *numbers)
    path = Path(name).expanduser()
    if not path.exists():
        raise NoSuchPlaceError("no such file or directory", name)
    path = path.resolve()
    parts: list[int] = []
    while len(parts) < 2 and (number := as_step(path.name)) is not None:
        parts.insert(0, number)
        path = path.parent
    return Target(Run(path) if parts else the_run(path), *parts)


def find_targets(names: Sequence[str], within: Path) -> list[Target]:
    """What each name stands for; without names every run in `within`."""
    if names:
        return [find_target(name, within) for name in names]
    return [Target(run) for run in find_runs(within)]


def the_run(within: Path) -> Run:
    """The only run at or below a directory; raises where there are none or several."""
    runs = find_runs(within)
    if len(runs) == 1:
        return runs[0]
    if not runs:
        raise NoSuchPlaceError("no run has dumps here", str(within))
    names = ", ".join(run.name for run in runs[:5])
    raise NoSuchPlaceError(
        f"{len(runs)} runs have dumps here", str(within), f"name one with --dir: {names}"
    )


def default_dir() -> Path:
    return Path(DEFAULT_DUMP_DIR).expanduser()


def compact(steps: list[int]) -> str:
    """Ascending steps as the steps grammar writes them: ``1-5,8,10-30:10``.

    >>> compact([1, 2, 3, 7, 10, 20, 30])
    '1-3,7,10-30:10'
    """
    parts, i = [], 0
    while i < len(steps):
        j = i
        stride = steps[i + 1] - steps[i] if i + 1 < len(steps) else 1
        while j + 1 < len(steps) and steps[j + 1] - steps[j] == stride:
            j += 1
        if j - i < 2:
            parts.append(str(steps[i]))
            i += 1
            continue
        parts.append(f"{steps[i]}-{steps[j]}" + (f":{stride}" if stride > 1 else ""))
        i = j + 1
    return ",".join(parts)


def _is_run(path: Path) -> bool:
    return any(
        as_step(child.name) is not None or child.name == marks.WORK or _BAD.fullmatch(child.name)
        for child in _folders(path)
    )


def _folders(path: Path) -> list[Path]:
    """Directories in a directory, no links, by name."""
    try:
        with os.scandir(path) as entries:
            found = [e.path for e in entries if e.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [Path(p) for p in sorted(found)]
