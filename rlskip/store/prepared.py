"""A dump that can be written: checked, packed, and not yet on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

import attrs

from rlskip._copies import Memory
from rlskip._files import Folder
from rlskip.format import chunks, container
from rlskip.format.dump_errors import UnsupportedTypeError
from rlskip.store import commit
from rlskip.store.dump import whose
from rlskip.store.identity import Identity
from rlskip.store.layout import Place
from rlskip.store.meta import MAX_META, DumpMeta, check_info

# Of the identity and the info together: what else meta.json has takes less than the rest.
_MAX_BOTH = MAX_META - (1 << 12)


@attrs.frozen(eq=False)
class Prepared:
    """A dump that can be written: a codec keeps everything in it.

    Its arrays are views of the rollouts until :meth:`copied`. `on_conflict` is asked where another
    process's dump has the place: for the call's name to write to instead, or None.
    """

    place: Place
    index: dict[str, Any]
    arrays: list[chunks.Array]
    cost: int
    identity: Identity | None
    info: dict[str, Any]
    on_conflict: Callable[[DumpMeta], str | None] | None = None

    @property
    def copy_nbytes(self) -> int:
        """The most that :meth:`copied` takes of its arena."""
        return sum(array.copy_nbytes for array in self.arrays)

    def copied(self, arena: Memory) -> Prepared:
        """The same dump with its arrays in `arena`'s memory, so that the rollouts may change."""
        return attrs.evolve(self, arrays=chunks.copied(self.arrays, arena))

    def write_files(self, staging: Folder) -> DumpMeta:
        """Write both files into a directory, and sync them."""
        place = self.place
        with commit.synced(staging, place.dump) as file:
            checksum = container.write(file, {**whose(place), **self.index}, self.arrays, self.cost)
            stored = file.tell()
        meta = DumpMeta(
            step=place.step,
            call=place.call,
            rank=place.rank,
            world_size=place.world_size,
            checksum=checksum,
            nbytes=sum(array.nbytes for array in self.arrays),
            stored=stored,
            created=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
            identity=self.identity,
            info=self.info,
        )
        with commit.synced(staging, place.meta) as file:
            file.write(meta.to_bytes())
        return meta


def as_json(info: Mapping[str, Any], identity: Identity | None) -> dict[str, Any]:
    """`info` as ``meta.json`` keeps it beside `identity`.

    Raises UnsupportedTypeError for what it cannot keep, or where both are too large for it.
    """
    try:
        text = json.dumps(dict(info))
        plain: dict[str, Any] = json.loads(text)
        check_info(plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedTypeError(f"cannot keep this info: {error}", "info") from error
    nbytes = len(text) + len(json.dumps(identity.as_json() if identity else None))
    if nbytes > _MAX_BOTH:
        raise UnsupportedTypeError(
            f"the identity and the info take {nbytes} bytes, and meta.json holds {_MAX_BOTH}",
            "info" if 2 * len(text) > nbytes else "identity",
            "record a hash of what is large, or store it with the rollouts",
        )
    return plain
