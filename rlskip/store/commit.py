"""A dump is there completely or not at all, and what is bad is quarantined.

A dump is written in a staging directory and renamed into place. Of two writers that race for a name
the first rename wins. Nothing here relies on locks, so that network file systems will do. What a
killed writer leaves is known by :mod:`rlskip.jobs.alive`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import attrs

from rlskip._files import Folder, open_folder, sync_directory
from rlskip.format.dump_errors import AbsentDumpError, CorruptDumpError, UnreadableDumpError
from rlskip.jobs import alive
from rlskip.jobs.alive import WORK
from rlskip.store import index
from rlskip.store.dump import opened
from rlskip.store.layout import Place, quarantine_name
from rlskip.store.meta import DumpMeta

if TYPE_CHECKING:
    from rlskip.format.chunks import Array
    from rlskip.store.identity import Identity

logger = logging.getLogger(__name__)

_ATTEMPTS = 10
_NOT_NOW = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.ENOENT)


@attrs.frozen(eq=False)
class NewDump:
    """A dump that can be written: a codec keeps everything in it.

    Its arrays are views of the rollouts.
    """

    place: Place
    trees: dict[str, Any]
    arrays: list[Array]
    identity: Identity | None
    info: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def named(self, call: str) -> NewDump:
        """The same for another name of the call: both files have it."""
        return attrs.evolve(self, place=attrs.evolve(self.place, call=call))

    def publish(self, over: DumpMeta | None = None) -> tuple[DumpMeta, bool]:
        """Write it, sync it, and rename it into place.

        The rename decides who was first, and not a look before it. A dump that has the place
        already stays, but for the one that this is to be written `over`.

        Returns
        -------
        meta, is_own
            Of the dump that is there, and whether it is this one.
        """
        place = self.place
        with staging_directory(place.root, place.name) as staging:
            meta = self._write_files(staging)
            # The stamp now: no other dump has it, once this one is in its place.
            stamp = index.stamp_of(staging.stat(place.meta))
            for _ in range(_ATTEMPTS):
                if _rename(staging, place):
                    index.append(place.root, [index.IndexedDump.of(place, meta, stamp)])
                    return meta, True
                if (other := _there(place)) is None:
                    continue
                if over is None or other.checksum != over.checksum:
                    return other, False
                # Gone before the next attempt, so that none sees a mixture. Of two that replace
                # one name at once the last one stays.
                with contextlib.suppress(FileNotFoundError):
                    remove(place.directory, place.root)
        what = "other processes dump it again and again"
        raise FileExistsError(errno.EEXIST, what, str(place.directory))

    def _write_files(self, staging: Folder) -> DumpMeta:
        """Write both files into a directory, and sync them."""
        from rlskip.format import container  # who only removes dumps needs no numpy

        place = self.place
        with _synced(staging, place.dump) as file:
            checksum = container.write(file, {**place.whose, **self.trees}, self.arrays)
            stored = file.tell()
        meta = DumpMeta(
            **place.whose,
            checksum=checksum,
            nbytes=self.nbytes,
            stored=stored,
            created=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
            identity=self.identity,
            info=self.info,
        )
        with _synced(staging, place.meta) as file:
            file.write(meta.to_bytes())
        return meta


@contextlib.contextmanager
def staging_directory(root: Path, label: str) -> Iterator[Folder]:
    """A new directory below `root` to write in; gone afterwards unless renamed away."""
    # Owned before it is made: who sweeps between the two would else find a directory of nobody's.
    # The token keeps two writers of one dump apart.
    with open_folder(root, WORK, f"{label}~{alive.own(root)}", create=True) as folder:
        try:
            yield folder
        finally:
            if os.path.lexists(folder.path):
                _remove_tree(folder.path)


@contextlib.contextmanager
def _synced(folder: Folder, name: str) -> Iterator[BinaryIO]:
    """A new file to write; when the block ends, it is on the disk."""
    with folder.open(name, "x", buffering=1 << 20) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _rename(staging: Folder, place: Place) -> bool:
    """Rename the staging directory into place, durably; False where it is to be tried again.

    Then something has the name, or was removed in this moment.
    """
    # The order is important: both files are on the disk by now (`_synced`); then the directory that
    # lists them, then the name, then the directory that lists the name. So after a power cut there
    # is a whole dump of this name, or none.
    with contextlib.suppress(OSError):
        os.fsync(staging.handle)
    try:
        # A directory replaces an empty one only. A dump has files: the second writer of a name
        # always fails here, and a look before it could decide nothing.
        os.rename(staging.path, place.directory)
    except OSError as error:
        if error.errno not in _NOT_NOW or not os.path.lexists(staging.path):
            raise
        return False
    sync_directory(place.root)
    return True


def _there(place: Place) -> DumpMeta | None:
    """The meta of the dump that another process has written to `place`; None: there is none now.

    What has its name and is none is moved away. Raises OSError for what cannot be read: it may be
    a sound dump, which nobody quarantines.
    """
    # Looked at before it is read: it may be replaced by a sound one before it is moved away. And
    # another process may be quicker to move or to replace it.
    with contextlib.suppress(FileNotFoundError):
        judged = os.lstat(place.directory)
        try:
            with opened(place) as here:
                other = here.read_meta()
        except (CorruptDumpError, AbsentDumpError) as error:
            # What is stale counts as absent for a reader. It may have been moved, and be sound.
            stale = getattr(error.__cause__, "errno", None) == errno.ESTALE
            if stale or isinstance(error, UnreadableDumpError):
                raise OSError(errno.EIO, error.what, error.where) from error
            kept = move_away(place, judged)
            logger.warning("%s holds no readable dump. It is kept as %s", place.directory, kept)
        else:
            logger.info("%s has a dump already", place.directory)
            return other
    return None


# -- keeping what is bad, removing what is old ------------------------------------------------


def move_away(place: Place, judged: os.stat_result | None = None) -> str:
    """Rename a dump, or what has the name of its directory and is not one; returns the new name.

    With `judged` only that very directory is moved.

    Raises
    ------
    FileNotFoundError
        It is gone, or another dump has its place by now.
    """
    name, kept = place.name, quarantine_name(place.name)
    replaced = FileNotFoundError(errno.ENOENT, "it was replaced", str(place.directory))
    with open_folder(place.root) as folder:
        at = {"src_dir_fd": folder.handle, "dst_dir_fd": folder.handle}
        if judged is not None and not os.path.samestat(folder.stat(name), judged):
            raise replaced
        os.rename(name, kept, **at)
        # Another process may have replaced it between the look and the rename: then what was moved
        # is sound, and goes back. Where a third one has the place by then, it stays moved away.
        if judged is not None and not os.path.samestat(folder.stat(kept), judged):
            with contextlib.suppress(OSError):
                os.rename(kept, name, **at)
            raise replaced
    return kept


def remove(path: Path, root: Path) -> None:
    """Delete a dump: it vanishes in one rename, its files follow."""
    # The rename first: no reader finds a dump of which a part is gone. What is left of it by a
    # process that is killed now is owned, so the next sweep removes it.
    doomed = root / WORK / f"removed-{path.name}~{alive.own(root)}"
    os.rename(path, doomed)
    _remove_tree(doomed)


def _remove_tree(path: Path) -> None:
    for _ in range(_ATTEMPTS):  # a writer that holds the directory may still move files into it
        with contextlib.suppress(OSError):  # of which `ignore_errors` lets some pass
            shutil.rmtree(path, ignore_errors=True)
        if not os.path.lexists(path):
            return
