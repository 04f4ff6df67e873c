"""One dump: written, published, read back; moved away if it is bad, removed if it is old.

It is there completely or not at all: it is written in a staging directory and renamed into place.
Of two writers that race for a name the first rename wins. Nothing relies on locks, so that network
file systems will do. What a killed writer leaves is known by :mod:`rlskip.jobs.alive`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import attrs

from rlskip._files import Folder, RefusedFileError, open_folder, sync_directory
from rlskip.format.dump_errors import AbsentDumpError, CorruptDumpError, UnreadableDumpError
from rlskip.jobs import alive
from rlskip.jobs.alive import WORK
from rlskip.store import index
from rlskip.store.identity import Identity
from rlskip.store.layout import Place, quarantine_name
from rlskip.store.meta import MAX_META, DumpMeta

if TYPE_CHECKING:
    from rlskip.format import container
    from rlskip.format.chunks import Array

logger = logging.getLogger(__name__)

_ATTEMPTS = 10
_USES = {"lease": "a job generates it", "appending": "a process appends to it"}
_USE = re.compile(rf"({'|'.join(_USES)})-([0-9]+)(?:-.*)?")
_NOT_NOW = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.ENOENT)


# -- writing -----------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class NewDump:
    """A dump that can be written, as a codec keeps all of it; its arrays are views."""

    place: Place
    trees: dict[str, Any]
    arrays: list[Array]
    identity: Identity | None
    info: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def named(self, call: str) -> NewDump:
        """The same for another name of the call."""
        return attrs.evolve(self, place=attrs.evolve(self.place, call=call))

    def publish(self, over: DumpMeta | None = None) -> tuple[DumpMeta, bool]:
        """Write it, sync it, and rename it into place.

        A dump that has the place already stays, but for the one that this is to be written `over`.
        Returns the meta of the dump that is there, and whether it is this one.
        """
        place = self.place
        # Owned before it is made: who sweeps between the two would else find a directory of
        # nobody's. The token keeps two writers of one dump apart.
        staged = f"{place.name}~{alive.own(place.root)}"
        with open_folder(place.root, WORK, staged, create=True) as staging:
            try:
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
            finally:
                if os.path.lexists(staging.path):
                    _remove_tree(staging.path)
        what = "other processes dump it again and again"
        raise FileExistsError(errno.EEXIST, what, str(place.directory))

    def _write_files(self, staging: Folder) -> DumpMeta:
        """Write both files into a directory, and sync them."""
        from rlskip.format import container  # who only removes dumps needs no numpy

        place = self.place
        with _synced(staging, place.dump) as file:
            checksum = container.write(file, {**place.whose, **self.trees}, self.arrays)
            stored = file.tell()
        created = datetime.now(timezone.utc).isoformat(timespec="microseconds")
        about = {"identity": self.identity, "info": self.info, **place.whose}
        meta = DumpMeta(
            checksum=checksum, nbytes=self.nbytes, stored=stored, created=created, **about
        )
        with _synced(staging, place.meta) as file:
            file.write(meta.to_bytes())
        return meta


@contextlib.contextmanager
def _synced(folder: Folder, name: str) -> Iterator[BinaryIO]:
    """A new file to write; when the block ends, it is on the disk."""
    with folder.open(name, "x", buffering=1 << 20) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _rename(staging: Folder, place: Place) -> bool:
    """Rename the staging directory into place, durably; False where something has the name."""
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
    """The meta of the dump that another process has written; None where there is none now.

    What has its name and is none is moved away. Raises OSError for what cannot be read: it may be
    a sound dump, which nobody quarantines.
    """

    def keep(place: Place, _: str, judged: os.stat_result) -> None:
        with contextlib.suppress(FileNotFoundError):  # another process was quicker
            kept = move_away(place, judged)
            logger.warning("rlskip: %s holds no readable dump; kept as %s", place.directory, kept)

    try:
        with opened(place, keep) as here:
            other = here.read_meta()
    except UnreadableDumpError as error:
        raise OSError(errno.EIO, error.what, error.where) from error
    except (CorruptDumpError, AbsentDumpError):
        return None
    logger.info("rlskip: %s has a dump already", place.directory)
    return other


# -- reading -----------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(
    place: Place,
    quarantine: Callable[[Place, str, os.stat_result], object] = lambda *_: None,
) -> Iterator[OpenDump]:
    """Hold a dump's directory open, so that its files belong together whatever is renamed.

    Who opened them by their paths could get one file of a dump, and one of the dump that replaced
    it in between. What fails within the block becomes an AbsentDumpError, where there is no such
    directory or file (any more); an UnreadableDumpError, for the file system's faults and too
    little memory or stack; or a CorruptDumpError, where something else has the directory's name.
    What is corrupt is given to `quarantine`, with the reason and what was judged: another process
    may have put another dump there since.
    """
    where = f"{place.root}/{place.name}"
    try:
        judged = os.lstat(where)
        try:
            with open_folder(place.root, place.name) as folder:
                yield OpenDump(place, folder)
        except (CorruptDumpError, RefusedFileError) as error:
            quarantine(place, error.what, judged)
            if isinstance(error, CorruptDumpError):
                raise
            raise CorruptDumpError(error.what, error.where) from error
    except RecursionError as error:
        raise UnreadableDumpError.by_process(error, where) from error
    except (OSError, MemoryError) as error:
        # ESTALE: another host has removed what is open here (NFS).
        if getattr(error, "errno", None) in (errno.ENOENT, errno.ESTALE):
            raise AbsentDumpError("there is no dump of this step", where) from error
        reason = error if isinstance(error, OSError) else "there is not enough memory"
        raise UnreadableDumpError(f"it cannot be read at the moment: {reason}", where) from error


@attrs.frozen
class OpenDump:
    """A dump whose directory is held open: its two files, checked against each other."""

    place: Place
    folder: Folder

    def read_meta(self) -> DumpMeta:
        """Its ``meta.json``; raises FileNotFoundError where neither file is there.

        Raises CorruptDumpError where it is damaged, or does not fit its place or ``gen_batch.dp``.
        """
        place = self.place
        where = f"{place.root}/{place.name}/{place.meta}"
        try:
            meta = DumpMeta.from_bytes(self.folder.read(place.meta, MAX_META), where)
            size = self.folder.stat(place.dump).st_size
        except FileNotFoundError:
            # One rename published both: if anything is here without one of them, that was removed.
            there = {*self.folder.names()}
            if missing := there and {place.dump, place.meta} - there:
                what = f"{', '.join(sorted(missing))} is missing"
                raise CorruptDumpError(what, str(place.directory)) from None
            raise
        if place != Place(place.root, meta.step, meta.call, meta.rank, meta.world_size):
            what = f"it was written for step {meta.step}, call {meta.call!r}, "
            raise CorruptDumpError(f"{what}rank {meta.rank} of {meta.world_size}", where)
        if size != meta.stored:
            what = f"it has {size} bytes of {meta.stored}"
            raise CorruptDumpError(what, f"{place.directory}/{place.dump}")
        return meta

    @contextlib.contextmanager
    def reader(self, meta: DumpMeta, max_bytes: int | None = None) -> Iterator[container.Reader]:
        """Open the ``gen_batch.dp`` that `meta` describes to read its arrays.

        Raises as :meth:`read_meta`, and AbsentDumpError where another dump has its place by now.
        """
        from rlskip.format import container  # who only looks at meta.json needs no numpy

        where = f"{self.place.root}/{self.place.name}/{self.place.dump}"
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(self.folder.open(self.place.dump, buffering=0))
                reader = container.Reader(file, where, meta.checksum, max_bytes)
            except (FileNotFoundError, CorruptDumpError) as error:
                # `meta` may be of an earlier look. In this directory, which nobody can replace
                # while it is open, both files are of one dump.
                if self.read_meta().checksum != meta.checksum:
                    what = "another job replaced it meanwhile"
                    raise AbsentDumpError(what, str(self.place.directory)) from error
                raise
            yield reader


# -- keeping what is bad, removing what is old ------------------------------------------------


def move_away(place: Place, judged: os.stat_result | None = None) -> str:
    """Rename what has the name of a dump; returns the new name.

    With `judged` only that very directory is moved. Raises FileNotFoundError where it is gone, or
    another one has its place by now.
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
    with contextlib.suppress(OSError):  # of which `ignore_errors` lets some pass
        shutil.rmtree(path, ignore_errors=True)


def appending(root: Path, step: int) -> contextlib.AbstractContextManager[None]:
    """Mark the step's journal as one that grows, where a mark can be written."""
    return alive.holding(root, f"appending-{step}")


def in_use(root: Path) -> dict[int, str]:
    """The steps that living jobs generate; raises OSError where that cannot be seen."""
    uses = (_USE.fullmatch(label) for label, _ in alive.held(root))
    return {int(use[2]): _USES[use[1]] for use in uses if use}
