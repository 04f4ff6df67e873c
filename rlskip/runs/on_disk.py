"""The runs and dumps below a dump_dir, and which of them a name on the command line means.

Nothing is changed here: a trainer's store quarantines a corrupt dump, this module only reports it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from rlskip._files import open_folder
from rlskip.config.steps import compact
from rlskip.errors import RlskipError
from rlskip.format.dump_errors import AbsentDumpError, DumpError
from rlskip.jobs.records import FOLDER
from rlskip.store import commit
from rlskip.store.dump import is_complete, open_dump, read_meta, rebuild
from rlskip.store.layout import (
    WORK,
    Place,
    as_step,
    holds_rollouts,
    journal_name,
    journaled_step,
    journaled_steps,
    name_before_quarantine,
    run_name,
    shape_of,
    steps_among,
)
from rlskip.store.meta import DumpMeta

if TYPE_CHECKING:
    from rlskip.format.unpacking import Into


class NoSuchPlaceError(RlskipError, FileNotFoundError):
    """The directory, run or step that a command names does not exist."""


@attrs.frozen
class Dump:
    """One file of rollouts: a call's of a step, a mini-batch's, or a rank's shard.

    ``meta`` is None if it cannot be read, and ``problem`` is the reason. ``written`` is in seconds
    since the epoch, by the file system's clock; ``size`` in bytes on disk.
    """

    place: Place
    meta: DumpMeta | None
    problem: str | None
    written: float
    size: int
    is_one_of_several: bool = False

    @property
    def call(self) -> int:
        """Its number among the calls of its step, or that of the mini-batch."""
        return self.place.part or 0

    @property
    def step(self) -> int:
        return self.place.step

    @property
    def name(self) -> str:
        """As a user would name it: ``3``, ``3/0``, ``3 (rank 0 of 2)``."""
        name = f"{self.step}/{self.call}" if self.is_one_of_several else "/".join(self.place.parts)
        ranks = self.place.world_size
        return name if ranks == 1 else f"{name} (rank {self.place.rank} of {ranks})"

    @property
    def seconds(self) -> float | None:
        """The time that generating it took; None if it is not known."""
        return (self.meta.info.get("seconds") or None) if self.meta else None

    def load(
        self,
        part: str = "rollouts",
        *,
        into: Into = "torch",
        fields: Sequence[str] | None = None,
    ) -> Any:
        """The rollouts, verified. A DataProto comes as its parts; verl is not needed.

        Parameters
        ----------
        part
            ``rollouts``, or ``aside`` for what is stored beside them.
        into
            ``torch``, or ``numpy``: then torch is not loaded, and tensors and batches come as
            :mod:`rlskip.format.numpy_maker` says.
        fields
            Read only these of the outermost mapping or batch; None for all.

        Raises
        ------
        DumpError
            It cannot be used. It stays where it is.
        """
        with (
            commit.reading(self.place.root, self.step),
            self.place.opened() as here,
            open_dump(here) as (reader, _),
        ):
            value = rebuild(reader, part, fields, into)
            if fields is None:
                reader.verify()
            return value

    def verify(self) -> str | None:
        """Compare every byte with its checksum; the reason why the dump is unusable, or None.

        Raises
        ------
        AbsentDumpError
            It was removed since it was listed.
        """
        try:
            with self.place.opened() as here:
                if is_complete(here):
                    with open_dump(here) as (reader, _):
                        reader.verify()
                    return None
            problem = "shards of other ranks are missing, or of another call"
        except DumpError as error:
            problem = error.what
        if not _files_of(self.place):
            raise AbsentDumpError("it was removed meanwhile", str(self.place.directory))
        return problem


@attrs.frozen
class Run:
    """The directory of one run's dumps."""

    directory: Path

    @property
    def name(self) -> str:
        """The directory below the dump_dir: of an experiment, a shape, and maybe a role."""
        return run_name(self.directory)

    @property
    def dump_dir(self) -> Path:
        return self.directory.parents[self.name.count("/")]

    def steps(self) -> list[int]:
        """The steps that have a directory, ascending."""
        return steps_among(path.name for path in _folders(self.directory))

    def dumps(
        self, step: int | None = None, part: int | None = None, *, identities: bool = True
    ) -> list[Dump]:
        """The dumps in order: all, those of one step, or those of one of its calls or parts.

        Without `identities` their metas lack them, and torch is not needed.
        """
        steps = self.steps() if step is None else [step]
        return [
            dump
            for number in steps
            for dump in self._of(number, identities)
            if part is None or dump.call == part
        ]

    def quarantine(self) -> list[Path]:
        """What is quarantined: directories of steps, of later calls or parts, and journals."""
        steps = (self.directory / str(step) for step in self.steps())
        folders = [path for folder in (self.directory, *steps) for path in _folders(folder)]
        files = [self.directory / name for name in _names(self.directory)]
        return [
            path
            for paths, number in ((folders, as_step), (files, journaled_step))
            for path in paths
            if number(name_before_quarantine(path.name)) is not None
        ]

    def journals(self) -> list[Path]:
        """The journals of steps that were interrupted, or are under way."""
        steps = journaled_steps(self.directory)
        return [self.directory / journal_name(step) for step in steps]

    def _of(self, step: int, identities: bool) -> Iterator[Dump]:
        step_itself = Place(self.directory, step)
        parts = steps_among(path.name for path in _folders(step_itself.directory))
        for first in _at(step_itself, identities):
            yield attrs.evolve(first, is_one_of_several=any(parts))
        for part in parts:
            yield from _at(attrs.evolve(step_itself, part=part), identities)


def _at(place: Place, identities: bool) -> Iterator[Dump]:
    """The dumps of all ranks whose files are in the directory of `place` itself."""
    for one in place.among(_names(place.directory)):
        meta, problem = None, None
        try:
            with one.opened() as here:
                meta = read_meta(here, identities)
        except DumpError as error:
            problem = error.what
        if found := _files_of(one):  # else it was removed meanwhile
            written = max(file.st_mtime for file in found)
            yield Dump(one, meta, problem, written, sum(file.st_size for file in found))


def _files_of(place: Place) -> list[os.stat_result]:
    """Those of the dump's two files that are there."""
    found = []
    for name in (place.dump, place.meta):
        with contextlib.suppress(OSError):
            found.append(os.lstat(place.directory / name))
    return found


# -- names on the command line -------------------------------------------------------------------


@attrs.frozen
class Selection:
    """A run, a step of it, or a call or mini-batch of that."""

    run: Run
    step: int | None = None
    part: int | None = None

    @property
    def name(self) -> str:
        numbers = [str(n) for n in (self.step, self.part) if n is not None]
        return "/".join([self.run.name, *numbers])

    def dumps(self) -> list[Dump]:
        """Its dumps; raises NoSuchPlaceError if it is a step without one."""
        found = self.run.dumps(self.step, self.part)
        if not found and self.step is not None:
            steps = self.run.steps()
            there = f"its steps are {compact(steps)}" if steps else "the run has no dumps"
            raise NoSuchPlaceError("this step has no dump", self.name, there)
        return found


def find_runs(where: Path) -> list[Run]:
    """The runs at or below a directory: a dump_dir, an experiment's, or a run's own.

    A run is a directory with dumps of rlskip or verl. Names with numbers are in natural order.
    """
    if not where.is_dir():
        remedy = "name the skip.dump_dir of the job, or a run in it"
        raise NoSuchPlaceError("no such directory", str(where), remedy)
    # {dump_dir}/{experiment}_{project}/{shape}[/{role}]
    runs = [Run(path) for path in _runs_in(where, 3)]
    return sorted(runs, key=lambda run: _natural(run.name))


def _runs_in(path: Path, levels: int) -> Iterator[Path]:
    if is_run := _is_run(path):
        yield path
    if levels and path.name != FOLDER:
        for below in _folders(path):
            # Below a run there are only those of its roles.
            if as_step(below.name) is None and not below.name.startswith("."):
                yield from _runs_in(below, 0 if is_run else levels - 1)


def _natural(name: str) -> list[str | int]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name)]


def find_target(name: str, within: Path) -> Selection:
    """What ``3``, ``3/0`` or a path means; a number is a step of the only run in `within`.

    Raises
    ------
    NoSuchPlaceError
        It does not exist, or a number is given and there are several runs.
    """
    numbers = [as_step(part) for part in name.split("/")] if len(name) < 40 else [None]
    if len(numbers) <= 2 and None not in numbers:
        return Selection(the_run(within), *numbers)
    path = Path(name).expanduser()
    if not path.exists():
        raise NoSuchPlaceError("no such file or directory", name)
    path = path.resolve()
    parts: list[int] = []
    while len(parts) < 2 and (number := as_step(path.name)) is not None:
        parts.insert(0, number)
        path = path.parent
    return Selection(Run(path) if parts else the_run(path), *parts)


def find_targets(names: Sequence[str], within: Path) -> list[Selection]:
    """What each name means; without names every run in `within`."""
    if names:
        return [find_target(name, within) for name in names]
    return [Selection(run) for run in find_runs(within)]


def the_run(within: Path) -> Run:
    """The only run at or below a directory; raises NoSuchPlaceError for none or several."""
    runs = find_runs(within)
    if len(runs) == 1:
        return runs[0]
    if not runs:
        raise NoSuchPlaceError("no run has dumps here", str(within))
    names = ", ".join(run.name for run in runs[:5])
    what = f"{len(runs)} runs have dumps here"
    raise NoSuchPlaceError(what, str(within), f"name one with --dir: {names}")


def _is_run(path: Path) -> bool:
    """Whether it has dumps, quarantined dumps, journals, or a staging directory."""
    return bool(journaled_steps(path)) or any(
        child.name == WORK
        or as_step(name_before_quarantine(child.name)) is not None
        or (as_step(child.name) is not None and _has_dump(child))
        for child in _folders(path)
    )


def _has_dump(step: Path) -> bool:
    parts = (child for child in _folders(step) if as_step(child.name) is not None)
    names = (name for folder in (step, *parts) for name in _names(folder))
    of_run = any(shape_of(path.name) for path in (step.parent, step.parent.parent))
    return holds_rollouts(names, of_run=of_run)


def _folders(path: Path) -> list[Path]:
    """The directories in a directory, without links, by name; none if it cannot be read."""
    try:
        with os.scandir(path) as entries:
            found = [e.path for e in entries if e.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return [Path(p) for p in sorted(found)]


def _names(folder: Path) -> list[str]:
    try:
        with open_folder(folder) as opened:
            return sorted(opened.names())
    except OSError:
        return []
