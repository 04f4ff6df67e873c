"""The session journal: what of a step was finished before its process was killed.

One file per step, appended to as sessions end, beside the step's dump and gone once that is
there. A file is a run of frames::

    head    32 bytes   magic, length of the body, its checksum
    body               one record, in the format of a dump's file

The first frame holds the identity that the sessions were generated under, every other one a
batch of sessions. A process may be killed in the middle of an append: a last frame that is not
whole is cut off, and all before it counts.
"""

from __future__ import annotations

import io
import logging
import os
import struct
import tempfile
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from rlskip.store import container
from rlskip.store.codec import Packer, Unpacker
from rlskip.store.commit import name_aside
from rlskip.store.errors import CorruptDumpError, DumpError, NewerFormatError
from rlskip.store.identity import Identity

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<8sQ16s")
_MAGIC = b"rlsjrnl\n"


class SessionJournal:
    """The finished sessions of one step.

    Parameters
    ----------
    path
        The file; made on the first append.
    identity
        What sessions are generated under now. A journal of another identity is set aside: its
        sessions are not this run's.

    Attributes
    ----------
    entries
        What an earlier process left: key to value, as :meth:`append` was given them.
    """

    def __init__(self, path: str | Path, identity: Identity) -> None:
        self.path = Path(path)
        self.entries: dict[Hashable, Any] = {}
        self._identity = identity
        self._file: io.FileIO | None = None
        if self.path.exists():
            self._recover()

    def append(self, entries: Mapping[Hashable, Any]) -> None:
        """Add finished sessions; when this returns they outlive the process.

        Raises
        ------
        UnsupportedTypeError
            A value holds what cannot be kept; nothing was written.
        OSError
            Disk full and the like.
        """
        frame = _frame([[key, value] for key, value in entries.items()])
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed in close()
            if self._file.tell() == 0:
                frame = _frame(self._identity.as_json()) + frame
        end = self._file.tell()
        try:
            # One write, so that frames of two processes never run into each other.
            if self._file.write(frame) != len(frame):
                raise OSError(f"{self.path}: the disk took only a part")
        except OSError:
            self._file.truncate(end)
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def discard(self) -> None:
        """Close and remove the file: the step's dump is there, say."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _recover(self) -> None:
        with open(self.path, "rb") as file:
            data = file.read()
        end = 0
        try:
            for record, stop in _frames(data, str(self.path)):
                if end == 0:
                    must, warn = self._identity.differences(Identity.from_json(record))
                    if warn:
                        differs = "; ".join(warn)
                        logger.warning("%s: resumed although it differs: %s", self.path, differs)
                    if must:
                        self._set_aside("its sessions are of another run: " + "; ".join(must))
                        return
                else:
                    self.entries.update((key, value) for key, value in record)
                end = stop
        except (NewerFormatError, TypeError, ValueError) as error:
            self.entries.clear()
            self._set_aside(f"it cannot be read: {error}")
            return
        if end < len(data):
            logger.warning("%s: cut off %d bytes of a torn tail", self.path, len(data) - end)
            os.truncate(self.path, end)

    def _set_aside(self, reason: str) -> None:
        kept = self.path.with_name(name_aside(self.path.name))
        os.rename(self.path, kept)
        logger.warning("%s cannot be used: %s. It is kept as %s", self.path, reason, kept.name)


def _frame(value: Any) -> bytes:
    packer = Packer()
    index = {"record": packer.node(value)}
    body = io.BytesIO()
    container.write(body, index, packer.arrays)
    data = body.getvalue()
    return _HEAD.pack(_MAGIC, len(data), xxhash.xxh3_128_digest(data)) + data


def _frames(data: bytes, where: str) -> Iterator[tuple[Any, int]]:
    """The records of the whole frames from the start on, each with where its frame ends."""
    at = 0
    while at + _HEAD.size <= len(data):
        magic, length, digest = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        body = data[at : at + length]
        if magic != _MAGIC or len(body) < length or xxhash.xxh3_128_digest(body) != digest:
            return
        at += length
        with tempfile.TemporaryFile() as file:  # a Reader reads files
            file.write(body)
            file.flush()
            reader = container.Reader(file, where)
            try:
                record = Unpacker(reader).node(reader.index["record"])
            except DumpError:
                raise
            except Exception as error:  # a file's nodes may be anything
                raise CorruptDumpError("its index does not fit together", where=where) from error
        yield record, at
