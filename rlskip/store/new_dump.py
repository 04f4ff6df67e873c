"""A dump that can be written: checked and packed, and then published under its name."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

import attrs

from rlskip._files import Folder
from rlskip.format import chunks, container
from rlskip.format.dump_errors import (
    AbsentDumpError,
    CorruptDumpError,
    UnreadableDumpError,
    UnsupportedTypeError,
)
from rlskip.store import commit, index
from rlskip.store.dump import whose
from rlskip.store.identity import Identity
from rlskip.store.layout import Place
from rlskip.store.meta import MAX_META, DumpMeta, check_info

logger = logging.getLogger(__name__)

_ATTEMPTS = 10
# Of the identity and the info together: what else meta.json has takes less than the rest.
_MAX_BOTH = MAX_META - (1 << 12)


@attrs.frozen(eq=False)
class NewDump:
    """A dump that can be written: a codec keeps everything in it.

    Its arrays are views of the rollouts. `on_conflict` is asked where another process's dump has
    the place: for the call's name to write to instead, or None.
    """

    place: Place
    index: dict[str, Any]
    arrays: list[chunks.Array]
    identity: Identity | None
    info: dict[str, Any]
    on_conflict: Callable[[DumpMeta], str | None] | None = None

    def publish(self, read_meta: Callable[[Place], DumpMeta]) -> tuple[Place | None, DumpMeta]:
        """Write it, sync it, and rename it into place.

        The rename decides who was first, and not a look before it. A dump that has the place
        already, whose meta `read_meta` reads, stays, or this one goes where `on_conflict` says; a
        shard replaces it, because all shards of a call are of one generation.

        Returns
        -------
        place, meta
            Where it is now, None if it was dropped; the meta of the dump that is there.
        """
        dump = self
        while True:
            place = dump.place
            with commit.staging_directory(place.root, place.name) as staging:
                meta = dump._write_files(staging)
                stamp = index.stamp_of(staging.stat(place.meta))  # no other dump's, once it is here
                commit.quarantine_other_than_directory(place.directory)
                for _ in range(_ATTEMPTS):
                    if commit.publish(staging, place.directory):
                        index.note(place, meta, stamp)
                        return place, meta
                    if (other := _there(place, read_meta)) is None:
                        continue
                    elsewhere = dump.on_conflict(other) if dump.on_conflict else None
                    if elsewhere is not None:
                        break
                    if place.world_size == 1:
                        return None, other
                    # Gone before the next attempt, so that none sees a mixture. Of two that replace
                    # one name at once the last one stays.
                    with contextlib.suppress(FileNotFoundError):
                        commit.remove(place.directory, place.root)
                else:
                    what = "other processes dump it again and again"
                    raise FileExistsError(errno.EEXIST, what, str(place.directory))
            # Written again, not renamed: both files name the call. And asked again, because another
            # job may have taken that name as well.
            dump = attrs.evolve(dump, place=attrs.evolve(place, call=elsewhere))

    def _write_files(self, staging: Folder) -> DumpMeta:
        """Write both files into a directory, and sync them."""
        place = self.place
        with commit.synced(staging, place.dump) as file:
            checksum = container.write(file, {**whose(place), **self.index}, self.arrays)
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


def _there(place: Place, read_meta: Callable[[Place], DumpMeta]) -> DumpMeta | None:
    """The meta of the dump that another process has written to `place`; None: there is none now.

    What has its name and is none is moved away. Raises OSError for what cannot be read: it may be
    a sound dump, which nobody quarantines.
    """
    # Looked at before it is read: it may be replaced by a sound one before it is moved away. And
    # another process may be quicker to move or to replace it.
    with contextlib.suppress(FileNotFoundError):
        judged = os.lstat(place.directory)
        try:
            other = read_meta(place)
        except (CorruptDumpError, AbsentDumpError) as error:
            # What is stale counts as absent for a reader. It may have been moved, and be sound.
            stale = getattr(error.__cause__, "errno", None) == errno.ESTALE
            if stale or isinstance(error, UnreadableDumpError):
                raise OSError(errno.EIO, error.what, error.where) from error
            kept = commit.move_away(place, judged)
            logger.warning("%s holds no readable dump. It is kept as %s", place.directory, kept)
        else:
            logger.info("%s has a dump already", place.directory)
            return other
    return None


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
