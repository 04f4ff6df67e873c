"""The dumps below a dump_dir: which there are, and what one holds.

Nothing is changed here: a trainer's store quarantines a corrupt dump, this module only reports it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from rlskip._files import open_folder
from rlskip.errors import RlskipError
from rlskip.format.dump_errors import AbsentDumpError, DumpError
from rlskip.store import commit
from rlskip.store.dump import opened
from rlskip.store.layout import (
    WORK,
    Place,
    as_step,
    holds_rollouts,
    journaled_steps,
    name_before_quarantine,
    shape_of,
    steps_among,
)
from rlskip.store.meta import DumpMeta

if TYPE_CHECKING:
    from rlskip.format.container import Reader
    from rlskip.format.kinds import Into
    from rlskip.runs.rollouts import Decode, Rollouts


@attrs.frozen
class Dump:
    """One file of rollouts: a call's of a step, a mini-batch's, or a rank's shard.

    ``meta`` is None if it cannot be read, and ``problem`` is the reason. It lacks the
    identity (:meth:`full_meta`). ``written`` is in seconds since the epoch, by the file system's
    clock; ``size`` in bytes on disk.
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

    @property
    def tokenizer(self) -> str | None:
        """The directory of the tokenizer that it names."""
        path = self.meta.info.get("tokenizer") if self.meta else None
        return path if isinstance(path, str) else None

    def full_meta(self) -> DumpMeta:
        """Its meta with the identity, read again; raises DumpError where it cannot be read."""
        with opened(self.place) as here:
            return here.read_meta()

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
        from rlskip.format.kinds import rebuild

        with self._opened() as (reader, _):
            value = rebuild(reader, part, fields, into)
            if fields is None:
                reader.verify()
            return value

    def rollouts(
        self,
        fields: Sequence[str] | None = None,
        *,
        decode: Decode | None = None,
        more: Mapping[str, Any] | None = None,
        told: set[str] | None = None,
    ) -> Rollouts:
        """The rollouts as rows, sessions and groups, verified; torch is not needed.

        Parameters
        ----------
        fields
            What the rows are to have: keys that every row has
            (:data:`~rlskip.runs.rollouts.ROW`), or names of the trainer's own. Only what these
            need is read. None for everything.
        decode
            Makes text of tokens. By default the recorded tokenizer does, where `fields` asks for
            text.
        more
            What each row says of its place besides step and call.
        told
            The fields of which it was said that they do not fit their tokens.

        Raises
        ------
        DumpError
            It cannot be used, or it has no such field. It stays where it is.
        """
        from rlskip.batch.decoding import decoder_at
        from rlskip.runs.reading import read_columns
        from rlskip.runs.rollouts import TEXTS, Rollouts

        with self._opened() as (reader, meta):
            columns = read_columns(reader, meta, fields)
        if decode is None and not TEXTS.keys().isdisjoint(fields or ()):
            if self.tokenizer is None:
                remedy = "name one: rlskip.open(path, tokenizer=...)"
                raise RlskipError("the dump names no tokenizer", f"step {self.step}", remedy)
            decode = decoder_at(self.tokenizer)
        place = {**(more or {}), "step": self.step, "call": self._numbered_call}
        if self.place.world_size > 1:
            place["rank"] = self.place.rank
        return Rollouts(columns, place, fields, decode, told)

    def fields(self) -> list[str]:
        """The names of the trainer's fields, of which only the index is read.

        Empty where rows are mappings of their own, such as a list of dicts.
        """
        from rlskip.runs.reading import field_names

        with self._opened() as (reader, _):
            return field_names(reader)

    @property
    def _numbered_call(self) -> int | None:
        several = self.is_one_of_several or self.place.part is not None
        return self.call if several else None

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[Reader, DumpMeta]]:
        with (
            commit.reading(self.place.root, self.step),
            opened(self.place) as here,
            here.reader() as found,
        ):
            yield found

    def verify(self) -> str | None:
        """Compare every byte with its checksum; the reason why the dump is unusable, or None.

        Raises
        ------
        AbsentDumpError
            It was removed since it was listed.
        """
        try:
            with opened(self.place) as here:
                if here.is_complete():
                    with here.reader() as (reader, _):
                        reader.verify()
                    return None
            problem = "shards of other ranks are missing, or of another call"
        except DumpError as error:
            problem = error.what
        if not _files_of(self.place):
            raise AbsentDumpError("it was removed meanwhile", str(self.place.directory))
        return problem


def dumps_of(directory: Path, step: int, part: int | None = None) -> list[Dump]:
    """The dumps of a step of the run in `directory`, in order, or those of one of its calls."""
    itself = Place(directory, step)
    parts = steps_among(folder_names(itself.directory))
    several = any(parts)
    found = [attrs.evolve(one, is_one_of_several=several) for one in _at(itself)]
    for number in parts:
        found += _at(attrs.evolve(itself, part=number))
    return [dump for dump in found if part is None or dump.call == part]


def _at(place: Place) -> Iterator[Dump]:
    """The dumps of all ranks whose files are in the directory of `place` itself."""
    for one in place.among(names_in(place.directory)):
        meta, problem = None, None
        try:
            with opened(one) as here:
                meta = here.read_meta(identity=False)  # which needs numpy
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


def is_run(path: Path, names: Sequence[str]) -> bool:
    """Whether it has dumps, quarantined dumps, journals, or a staging directory.

    `names` are those of its directories.
    """
    return (
        WORK in names
        or any(as_step(name) is not None and _has_dump(path / name) for name in names)
        or any(as_step(name_before_quarantine(name)) is not None for name in names)
        or bool(journaled_steps(path))
    )


def _has_dump(step: Path) -> bool:
    parts = (step / str(part) for part in steps_among(folder_names(step)))
    names = (name for folder in (step, *parts) for name in names_in(folder))
    of_run = any(shape_of(path.name) for path in (step.parent, step.parent.parent))
    return holds_rollouts(names, of_run=of_run)


def folder_names(path: Path) -> list[str]:
    """The directories in a directory, without links, by name; none if it cannot be read."""
    try:
        with os.scandir(path) as entries:
            return sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
    except OSError:
        return []


def names_in(folder: Path) -> list[str]:
    try:
        with open_folder(folder) as opened:
            return sorted(opened.names())
    except OSError:
        return []
