"""One dump whose directory is held open: its two files, read and checked against each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from rlskip.format.dump_errors import CorruptDumpError
from rlskip.store.layout import OpenPlace, Place, call_numbers
from rlskip.store.meta import MAX_META, DumpMeta

if TYPE_CHECKING:
    from rlskip.format import container


def whose(place: Place | DumpMeta) -> dict[str, int | None]:
    """What both files of a dump record of its place, under the names that format 1 gives."""
    return {
        "step": place.step,
        "inner": place.part,
        "rank": place.rank,
        "world_size": place.world_size,
    }


def _has_own(place: Place, names: frozenset[str]) -> bool:
    """Whether both of this rank's files are there; raises where only one of them is."""
    missing = {place.dump, place.meta} - names
    # The two files of a shard, or in a directory that later calls have, too, come one after the
    # other; those of other dumps in one rename.
    joins = place.part is None and place.dump in names and call_numbers(names)
    if len(missing) == 1 and place.world_size == 1 and not joins:
        raise CorruptDumpError(f"{missing.pop()} is missing", where=str(place.directory))
    return not missing


def is_complete(here: OpenPlace, compared: Sequence[Place] | None = None) -> bool:
    """Whether the files of all ranks are there, and the `compared` shards are of this one's call.

    By default all are compared, which reads as many files as there are ranks.
    """
    names, shards = here.names(), list(here.place.shards())
    if not _has_own(here.place, names) or not all({s.dump, s.meta} <= names for s in shards):
        return False
    return len(shards) == 1 or _are_of_one_call(here, shards if compared is None else compared)


def _are_of_one_call(here: OpenPlace, shards: Sequence[Place]) -> bool:
    """False where a job that replaces another's shards was killed or has not finished yet.

    Shards without a generation pass: nothing is known of them.
    """
    own = read_meta(here).info.get("generation")
    try:
        return all(
            read_meta(attrs.evolve(here, place=shard)).info.get("generation") == own
            for shard in shards
            if shard != here.place
        )
    except (FileNotFoundError, CorruptDumpError):
        return False  # its own rank decides what becomes of that shard


def read_meta(here: OpenPlace, identity: bool = True) -> DumpMeta:
    """The ``meta.json`` of this rank; raises as :meth:`OpenPlace.open` does."""
    place = here.place
    where = str(place.directory / place.meta)
    with here.open(place.meta, MAX_META) as file:
        meta = DumpMeta.from_bytes(file.read(), where, identity)
    _check_whose(whose(meta), place, where)
    size = here.size(place.dump)
    if size != meta.stored:
        raise CorruptDumpError(
            f"it has {size} bytes of {meta.stored}", where=str(place.directory / place.dump)
        )
    return meta


@contextlib.contextmanager
def open_dump(here: OpenPlace) -> Iterator[tuple[container.Reader, DumpMeta]]:
    """Open this rank's dump to read its arrays."""
    place = here.place
    where = str(place.directory / place.dump)
    try:
        meta = read_meta(here)
    except FileNotFoundError:
        _has_own(place, here.names())
        raise
    # Here, because whoever only looks at meta.json needs no numpy.
    from rlskip.format import container

    with here.open(place.dump) as file:
        reader = container.Reader(file, where, meta.checksum)
        _check_whose(reader.index, place, where)
        yield reader, meta


def _check_whose(found: Mapping[str, Any], place: Place, where: str) -> None:
    if any(found.get(name) != value for name, value in whose(place).items()):
        raise CorruptDumpError(
            f"it was written for step {found.get('step')}, part {found.get('inner')}, "
            f"rank {found.get('rank')} of {found.get('world_size')}",
            where=where,
        )
