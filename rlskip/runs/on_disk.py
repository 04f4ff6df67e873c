"""The dumps below a dump_dir: which there are, and what one holds.

Nothing is changed here: a trainer's store quarantines a corrupt dump, this module only reports it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from rlskip.batch.decoding import Decoder, decoder_at
from rlskip.errors import RlskipError
from rlskip.format.dump_errors import DAMAGE, AbsentDumpError, DumpError
from rlskip.jobs.alive import WORK
from rlskip.store.dump import opened
from rlskip.store.index import Index, stamp_of
from rlskip.store.layout import (
    Listing,
    Place,
    journaled_steps,
    name_before_quarantine,
    places_among,
    shape_of,
)
from rlskip.store.meta import DumpMeta

if TYPE_CHECKING:
    from rlskip.format.codec import Into
    from rlskip.format.container import Reader

log = logging.getLogger(__name__)


@attrs.frozen
class Dump:
    """One file of rollouts: a call's of a step, a mini-batch's, or a rank's shard.

    ``meta`` is None if it cannot be read, because of a ``problem``; it lacks what `full_meta` has.
    ``written`` is in seconds since the epoch, ``size`` in bytes on disk. ``call`` is its number
    among the calls of its step, or that of the mini-batch; None where one call was made.
    """

    place: Place
    meta: DumpMeta | None
    problem: str | None
    written: float
    size: int
    call: int | None = None
    has_all_shards: bool = True

    @property
    def step(self) -> int:
        return self.place.step

    @property
    def name(self) -> str:
        """As a user would name it: ``3``, ``3/0``, ``3 (rank 0 of 2)``."""
        name = str(self.step) if self.call is None else f"{self.step}/{self.call}"
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

    def decoder(self, *, skip_special: bool = False) -> Decoder | None:
        """By the tokenizer that it names; None where that is not there, or cannot be loaded."""
        with contextlib.suppress(RlskipError):
            return decoder_at(self.tokenizer, skip_special=skip_special) if self.tokenizer else None
        return None

    def full_meta(self) -> DumpMeta:
        """Its whole meta, read again; raises DumpError."""
        with opened(self.place) as here:
            return here.read_meta()

    def load(self, *, into: Into = "torch", fields: Sequence[str] | None = None) -> Any:
        """The rollouts, verified; of the outermost mapping or batch only `fields` are read.

        `into` is ``torch``, or ``numpy``: then torch is not loaded. Raises DumpError.
        """
        from rlskip.format.kinds import rebuild

        with self.opened() as (reader, _):
            value = rebuild(reader, "rollouts", fields, into)
            if fields is None:
                reader.verify()
            return value

    def fields(self) -> list[str]:
        """The names of the trainer's fields."""
        from rlskip.runs.reading import fields_of, read_columns

        with self.opened() as (reader, meta):
            return [*fields_of(reader)] or [*read_columns(reader, meta, None).columns]

    @contextlib.contextmanager
    def opened(self) -> Iterator[tuple[Reader, DumpMeta]]:
        """Hold it open to read it."""
        with opened(self.place) as here:
            meta = here.read_meta()
            with here.reader(meta) as reader:
                yield reader, meta

    def verify(self) -> str | None:
        """Compare every byte with its checksum; the reason why the dump is unusable, or None.

        Raises AbsentDumpError where it was removed since it was listed.
        """
        try:
            with self.opened() as (reader, _):
                reader.verify()
            if self.has_all_shards:
                return None
            problem = "shards of other ranks are missing, or of another call"
        except DumpError as error:
            problem = error.what
        if not _files_of(self.place):
            raise AbsentDumpError("it was removed meanwhile", str(self.place.directory))
        return problem


def dumps_of(directory: Path, step: int, call: int | None = None) -> list[Dump]:
    """The dumps of a step of the run in `directory`, in order, or those of one of its calls."""
    found = dumps_at(families(directory).get(step, []))
    return [dump for dump in found if call is None or (dump.call or 0) == call]


def dumps_at(places: Sequence[Place], *, indexed: bool = True) -> list[Dump]:
    """The dumps at all places of one step: as the calls were made; what cannot be read is last.

    Who reads few of a run's many steps does not read what the run's index says of all.
    """
    groups: dict[str, list[Dump]] = {}
    for dump in filter(None, [_read(place, indexed) for place in places]):
        # The shards of one call have the same generation.
        generation = dump.meta.info.get("generation") if dump.meta else None
        is_shard = dump.place.world_size > 1 and isinstance(generation, str)
        groups.setdefault(str(generation) if is_shard else dump.place.name, []).append(dump)

    def order(shards: Sequence[Dump]) -> tuple[int, Any]:
        first = min(shards, key=lambda dump: dump.place.rank)
        unknown = 1 << 62 if first.place.call else 0
        return first.meta.info.get("place", 0) if first.meta else unknown, first.place.order

    several, found = len(groups) > 1 or any(place.call for place in places), list[Dump]()
    for number, group in enumerate(sorted(groups.values(), key=order)):
        call, are_all = number if several else None, len(group) == group[0].place.world_size
        found += [attrs.evolve(dump, call=call, has_all_shards=are_all) for dump in group]
    return found


def _read(place: Place, indexed: bool) -> Dump | None:
    """The dump of a place; None if there is none (any more)."""
    meta, problem, found = None, None, _files_of(place)
    # What the index says is true of the two files that it was said of.
    index = _index(place.root)
    if indexed:
        index.refresh()
    known = index.dumps.get(place.name)
    if known is not None and len(found) == 2 and known.stamp == stamp_of(found[1]):
        with contextlib.suppress(*DAMAGE):
            meta = DumpMeta(**known.about)
    if meta is None or meta.stored != found[0].st_size:
        meta = None
        try:
            with opened(place) as here:
                meta = here.read_meta()
        except DumpError as error:
            problem = error.what
        if not (found := _files_of(place)):
            return None
    written = max(file.st_mtime for file in found)
    return Dump(place, meta, problem, written, sum(file.st_size for file in found))


def spread(steps: Sequence[int], most: int) -> list[int]:
    """At most so many of the steps, evenly, with the first and the last."""
    last = len(steps) - 1
    return [*steps] if last < most else [steps[i * last // (most - 1)] for i in range(most)]


def families(directory: Path) -> dict[int, list[Place]]:
    """By step the places of all dumps of a run, in order; they may hold nothing."""
    return _listing(directory).look().dumps


# Of the directory that is read: a run of many steps is listed, and its index read, once.
_listing = lru_cache(maxsize=1)(Listing)
_index = lru_cache(maxsize=1)(Index)


def has_dump(directory: Path, step: int) -> bool:
    """Whether a step of a run has files of a dump: its directories may be empty."""
    return any(_files_of(place) for place in families(directory).get(step, ()))


def _files_of(place: Place) -> list[os.stat_result]:
    """Those of the dump's two files that are there."""
    found, directory = [], os.path.join(place.root, place.name)  # a pathlib.Path takes longer
    for name in (place.dump, place.meta):
        with contextlib.suppress(OSError):
            found.append(os.lstat(os.path.join(directory, name)))
    return found


def is_run(path: Path, names: Sequence[str]) -> bool:
    """Whether it has dumps, quarantined dumps, journals, or a staging directory.

    `names` are those of its directories.
    """
    files = {Place.dump}
    if any(shape_of(one.name) for one in (path, path.parent)):
        files.add(Place.meta)  # alone it may be anybody's elsewhere
    return (
        WORK in names
        or any((place.directory / f).exists() for place in places_among(path, names) for f in files)
        or bool(places_among(path, map(name_before_quarantine, names)))
        or bool(journaled_steps(path))
    )


def folder_names(path: Path) -> list[str]:
    """The directories in a directory, without links, by name; none, and told, if it is not read."""
    try:
        with os.scandir(path) as entries:
            return sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):  # it was there a moment ago
        return []
    except OSError as error:
        log.warning("rlskip: %s cannot be listed: %s; it counts as empty", path, error.strerror)
        return []
