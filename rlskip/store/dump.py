"""One dump, its directory held open: its two files, read and checked against each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from rlskip.store import container
from rlskip.store.codec import Unpacker
from rlskip.store.errors import AbsentDumpError, CorruptDumpError, DumpError, UnknownTypeError
from rlskip.store.layout import OpenPlace, Place
from rlskip.store.meta import MAX_META, DumpMeta


def whose(place: Place) -> dict[str, int | None]:
    """What a dump says about its place, in both of its files."""
    return {
        "step": place.step,
        "inner": place.inner,
        "rank": place.rank,
        "world_size": place.world_size,
    }


def has_own(here: OpenPlace) -> bool:
    """Whether our own files are there; raises CorruptDumpError where only one of them is."""
    return _has_own(here.place, here.names())


def _has_own(place: Place, names: frozenset[str]) -> bool:
    present = {place.dump, place.meta} & names
    # A shard's two files come one after the other, a whole dump's in one rename.
    if len(present) == 1 and place.world_size == 1:
        missing = place.meta if place.dump in names else place.dump
        raise CorruptDumpError(f"{missing} is missing", where=str(place.directory))
    return len(present) == 2


def is_complete(here: OpenPlace) -> bool:
    """Whether the files of all ranks are there, and made together."""
    names, shards = here.names(), list(here.place.shards())
    if not _has_own(here.place, names) or not all({s.dump, s.meta} <= names for s in shards):
        return False
    return len(shards) == 1 or _are_of_one_call(here, shards)


def _are_of_one_call(here: OpenPlace, shards: list[Place]) -> bool:
    """Not so where a job that replaces another's shards has been killed, or is not yet done.

    Of shards whose writer gave no generation nothing is known: they pass.
    """
    own = read_meta(here).info.get("generation")
    try:
        return all(
            read_meta(attrs.evolve(here, place=shard)).info.get("generation") == own
            for shard in shards
            if shard != here.place
        )
    except (FileNotFoundError, CorruptDumpError):
        return False  # what becomes of that shard is for its own rank to say


def read_meta(here: OpenPlace) -> DumpMeta:
    place = here.place
    where = str(place.directory / place.meta)
    with here.open(place.meta) as file:
        data = file.read(MAX_META + 1)
    if len(data) > MAX_META:
        raise CorruptDumpError("meta.json is impossibly large", where=where)
    meta = DumpMeta.from_bytes(data, where)
    _check_whose({name: getattr(meta, name) for name in whose(place)}, place, where)
    size = here.size(place.dump)
    if size != meta.stored:
        raise CorruptDumpError(
            f"it has {size} bytes of {meta.stored}", where=str(place.directory / place.dump)
        )
    return meta


@contextlib.contextmanager
def open_dump(here: OpenPlace) -> Iterator[tuple[container.Reader, DumpMeta]]:
    place = here.place
    where = str(place.directory / place.dump)
    try:
        meta = read_meta(here)
    except FileNotFoundError as error:
        has_own(here)
        raise AbsentDumpError("there is no dump of this step", str(place.directory)) from error
    with here.open(place.dump) as file:
        reader = container.Reader(file, where, meta.checksum)
        _check_whose(reader.index, place, where)
        yield reader, meta


def _check_whose(said: Mapping[str, Any], place: Place, where: str) -> None:
    if any(said.get(name) != value for name, value in whose(place).items()):
        raise CorruptDumpError(
            f"it was written for step {said.get('step')}, mini-batch {said.get('inner')}, "
            f"rank {said.get('rank')} of {said.get('world_size')}",
            where=where,
        )


def rebuild(
    reader: container.Reader, part: str, fields: Sequence[str] | None, *, host_classes: bool = True
) -> Any:
    """One of the file's values; without `host_classes` a DataProto comes as its parts."""
    unpacker = Unpacker(reader, fields, host_classes)
    try:
        value = unpacker.root(reader.index[part])
    except UnknownTypeError as error:
        raise UnknownTypeError(error.what, reader.where, error.remedy) from error
    except (DumpError, MemoryError):
        raise
    except Exception as error:  # a file's nodes may be anything
        raise CorruptDumpError("its index does not fit together", reader.where) from error
    if missing := sorted(set(fields or ()) - unpacker.found):
        raise DumpError(f"it has no field {', '.join(map(repr, missing))}", reader.where)
    return value
