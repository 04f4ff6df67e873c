"""One dump whose directory is held open: its two files, read and checked against each other."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from rlskip._files import Folder, RefusedFileError, open_folder
from rlskip.format.dump_errors import AbsentDumpError, CorruptDumpError, UnreadableDumpError
from rlskip.store.layout import Place
from rlskip.store.meta import MAX_META, DumpMeta

if TYPE_CHECKING:
    from rlskip.format import container


@contextlib.contextmanager
def opened(place: Place) -> Iterator[OpenDump]:
    """Hold a dump's directory open, so that its files belong together whatever is renamed.

    Who opened them by their paths could get one file of a dump, and one of the dump that replaced
    it in between. The file system's faults within the block become one of these errors, too.

    Raises
    ------
    AbsentDumpError
        There is no such directory or file (any more).
    UnreadableDumpError
        The file system does not let it be read, or there is not enough memory, or stack.
    CorruptDumpError
        Something else has the directory's name: a file, a link.
    """
    try:
        with open_folder(place.root, place.name) as folder:
            yield OpenDump(place, folder)
    except RefusedFileError as error:
        raise CorruptDumpError(error.what, error.where) from error
    except RecursionError as error:
        raise UnreadableDumpError.by_process(error, str(place.directory)) from error
    except (OSError, MemoryError) as error:
        where = str(place.directory)
        # ESTALE: another host has removed what is open here (NFS).
        if getattr(error, "errno", None) in (errno.ENOENT, errno.ESTALE):
            raise AbsentDumpError("there is no dump of this step", where) from error
        reason = error if isinstance(error, OSError) else "there is not enough memory"
        raise UnreadableDumpError(f"it cannot be read at the moment: {reason}", where) from error


@attrs.frozen
class OpenDump:
    """A dump whose directory is held open by :func:`opened`."""

    place: Place
    folder: Folder

    def read_meta(self, identity: bool = True) -> DumpMeta:
        """Its ``meta.json``; raises FileNotFoundError where neither file is there.

        Raises CorruptDumpError where it is damaged, or does not fit its place or ``gen_batch.dp``.
        """
        place = self.place
        where = f"{place.directory}/{place.meta}"
        try:
            meta = DumpMeta.from_bytes(self.folder.read(place.meta, MAX_META), where, identity)
            found = self.folder.stat(place.dump)
        except FileNotFoundError:
            # One rename published both: where one of them is there, the other was removed.
            missing = {place.dump, place.meta} - {*self.folder.names()}
            if len(missing) == 1:
                what = f"{missing.pop()} is missing"
                raise CorruptDumpError(what, str(place.directory)) from None
            raise
        self._check_whose(attrs.asdict(meta, recurse=False), where)
        dump = f"{place.directory}/{place.dump}"
        if found.st_size != meta.stored:
            raise CorruptDumpError(f"it has {found.st_size} bytes of {meta.stored}", dump)
        return meta

    @contextlib.contextmanager
    def reader(self, meta: DumpMeta, max_bytes: int | None = None) -> Iterator[container.Reader]:
        """Open the ``gen_batch.dp`` that `meta` describes to read its arrays.

        Raises as :meth:`read_meta`, and AbsentDumpError where another dump has its place by now.
        """
        # Here, because whoever only looks at meta.json needs no numpy.
        from rlskip.format import container

        where = f"{self.place.directory}/{self.place.dump}"
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
            self._check_whose(reader.index, where)
            yield reader

    def _check_whose(self, found: Mapping[str, Any], where: str) -> None:
        if not self.place.whose.items() <= found.items():
            raise CorruptDumpError(
                f"it was written for step {found.get('step')}, call {found.get('call')!r}, "
                f"rank {found.get('rank')} of {found.get('world_size')}",
                where=where,
            )
