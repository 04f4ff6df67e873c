"""The session journal: the finished sessions of a step whose dump does not exist yet.

There is one file per step, next to the step's dump, which is removed once the dump exists. It is
a sequence of frames, one a session::

    head    32 bytes   magic, length of the body, checksum of the body
    body               one record, in the format of a dump's file

Each record holds its session and the identity that it was generated under, so every frame
stands alone. The file is only ever appended to, by any number of processes. An interrupted write
leaves a torn frame, and a damaged disk an altered one; a reader skips it, finds the next frame by
its magic, and copies the bytes in between to a quarantined file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import logging
import os
import struct
import tempfile
import threading
import time
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import attrs
import xxhash

from rlskip._files import open_folder
from rlskip.format import container
from rlskip.format.dump_errors import UnknownTypeError, UnreadableDumpError
from rlskip.format.kinds import Packer
from rlskip.format.unpacking import unpacker
from rlskip.store.identity import Identity
from rlskip.store.layout import quarantine_name

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<8sQ16s")
_MAGIC = b"rlsjrn2\n"
_BLOCK = 1 << 20

MAX_BYTES = 64 << 30
"""Larger journals are refused without being read."""
MAX_KEPT_BYTES = 256 << 20
"""More damaged bytes than this are not copied; they stay in the journal only."""


class SessionJournal:
    """The finished sessions of one step.

    Parameters
    ----------
    path
        The file; the first append creates it.
    identity
        What sessions are generated under now. Sessions of another identity are not resumed: a
        journal that holds no others is quarantined, unless another process appends to it.
    read
        Whether to read the file; false for who only appends.

    Attributes
    ----------
    entries
        The sessions of earlier processes: key to value, as :meth:`append` takes them.

    Raises
    ------
    OSError
        The journal cannot be read, or is not a regular file (:class:`RefusedFileError`).
    """

    def __init__(self, path: str | Path, identity: Identity, *, read: bool = True) -> None:
        self.path = Path(path)
        self.entries: dict[Hashable, Any] = {}
        self._identity = identity
        self._file: IO[bytes] | None = None
        self._busy = threading.Lock()
        if read:
            self._recover()

    def append(self, entries: Mapping[Hashable, Any]) -> None:
        """Add finished sessions; once this returns, they survive the death of the process.

        Raises
        ------
        UnsupportedTypeError
            A session has a value of a type that cannot be stored; the others were written.
        OSError
            The disk is full, for example. Sessions that were appended before are not affected.
        """
        frames, refused = [], None
        for key, value in entries.items():
            try:
                frames.append(_frame(self._identity, key, value))
            except Exception as error:  # a value may be anything
                refused = error
        data = b"".join(frames)
        with self._busy:
            # One write, so that frames of several processes never interleave.
            if data and self._open().write(data) != len(data):
                raise OSError(errno.ENOSPC, "only a part of a frame was written", str(self.path))
        if refused is not None:
            raise refused

    def close(self) -> None:
        """Close the file; an append that hangs keeps it open."""
        if self._busy.acquire(blocking=False):
            try:
                self._close()
            finally:
                self._busy.release()

    def _close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _open(self) -> IO[bytes]:
        """The file at `path`, even after another process quarantined or removed an earlier one."""
        for _ in range(100):
            if self._file is None:
                with open_folder(self.path.parent, create=True) as folder:
                    self._file = folder.open(self.path.name, "a", buffering=0)
                locked = _lock(self._file, fcntl.LOCK_SH)  # see _quarantine
            else:
                locked = True
            if locked and _is_at(self.path, self._file):
                return self._file
            self._close()
            time.sleep(0.01)
        raise OSError(errno.EAGAIN, "another process keeps replacing the journal", str(self.path))

    def _recover(self) -> None:
        try:
            with open_folder(self.path.parent) as folder:
                file = folder.open(self.path.name, max_bytes=MAX_BYTES)
        except FileNotFoundError:
            return
        with file:
            refused, allowed, damage = set(), set(), []
            for start, end, sessions in frames(file.fileno(), str(self.path)):
                if sessions is None:
                    damage.append((start, end))
                    continue
                must, warn = self._identity.differences(sessions.identity)
                refused.update(must)
                if not must:
                    allowed.update(warn)
                    self.entries.update(sessions.entries)
            if allowed:
                differs = "; ".join(sorted(allowed))
                logger.warning("%s: resumed although it differs: %s", self.path, differs)
            if damage:
                self._keep(file.fileno(), damage)
            if refused:
                differs = "; ".join(sorted(refused))
                kept = None if self.entries else self._quarantine(file)
                text = "%s holds sessions of another run, which are not resumed: %s%s"
                where = "" if kept is None else f". It is kept as {kept}"
                logger.warning(text, self.path, differs, where)

    def _keep(self, handle: int, damage: list[tuple[int, int]]) -> None:
        """Copy damaged bytes to a file whose name depends on them, so that it is written once."""
        total = sum(end - start for start, end in damage)
        if total > MAX_KEPT_BYTES:
            logger.warning("%s: skipped %d damaged bytes", self.path, total)
            return
        data = b"".join(os.pread(handle, end - start, start) for start, end in damage)
        name = quarantine_name(self.path.name, xxhash.xxh3_64_hexdigest(data))
        try:
            with (
                open_folder(self.path.parent) as folder,
                contextlib.suppress(FileExistsError),
                folder.open(name, "x") as file,
            ):
                file.write(data)
        except OSError as error:
            logger.warning("%s: skipped %d damaged bytes: %s", self.path, total, error)
        else:
            text = "%s: skipped %d damaged bytes. They are kept as %s"
            logger.warning(text, self.path, total, name)

    def _quarantine(self, file: IO[bytes]) -> str | None:
        """Move the file away, unless another process holds it open to append to it."""
        if not (_lock(file, fcntl.LOCK_EX) and _is_at(self.path, file)):
            return None
        kept = self.path.with_name(quarantine_name(self.path.name))
        os.rename(self.path, kept)
        return kept.name


@attrs.frozen
class Sessions:
    """The content of a frame."""

    identity: Identity
    entries: dict[Hashable, Any]


def _frame(identity: Identity, key: Hashable, value: Any) -> bytes:
    packer = Packer()
    record = packer.node({"identity": identity.as_json(), "entries": [[key, value]]})
    body = io.BytesIO()
    container.write(body, {"record": record}, packer.arrays, packer.cost)
    data = body.getvalue()
    return _HEAD.pack(_MAGIC, len(data), xxhash.xxh3_128_digest(data)) + data


def frames(handle: int, where: str) -> Iterator[tuple[int, int, Sessions | None]]:
    """Each range of a journal with its sessions; None for ranges that cannot be read."""
    for start, end, whole in _ranges(handle):
        found: Sessions | None = None
        try:
            if whole:
                body = os.pread(handle, end - start - _HEAD.size, start + _HEAD.size)
                record = _record(body, where)
                found = Sessions(Identity.from_json(record["identity"]), dict(record["entries"]))
        except (UnreadableDumpError, UnknownTypeError, MemoryError) as error:
            # The frame is sound: its sessions are not resumed now, and are no damage to keep.
            logger.warning("%s: the frame at %d is not resumed: %s", where, start, error)
            continue
        except Exception as error:  # the nodes of a file may be anything
            logger.warning("%s: the frame at %d cannot be read: %s", where, start, error)
        yield start, end, found


def _ranges(handle: int) -> Iterator[tuple[int, int, bool]]:
    """A journal's frames, and the ranges between them; whether each is a frame."""
    size, at, bad = os.fstat(handle).st_size, 0, 0
    while at < size:
        end = _end_of_frame(handle, at, size)
        if end is None:
            at = _next_magic(handle, at + 1, size)
            continue
        if bad < at:
            yield bad, at, False
        yield at, end, True
        at = bad = end
    if bad < size:
        yield bad, size, False


def _end_of_frame(handle: int, at: int, size: int) -> int | None:
    """Where the frame at `at` ends; None if there is no whole frame."""
    head = os.pread(handle, _HEAD.size, at)
    if len(head) < _HEAD.size:
        return None
    magic, length, checksum = _HEAD.unpack(head)
    start = at + _HEAD.size
    if magic != _MAGIC or start + length > size:
        return None
    digest = xxhash.xxh3_128()
    for offset in range(start, start + length, _BLOCK):
        digest.update(os.pread(handle, min(_BLOCK, start + length - offset), offset))
    return start + length if digest.digest() == checksum else None


def _next_magic(handle: int, at: int, size: int) -> int:
    """Where the next magic is, or `size`."""
    for offset in range(at, size, _BLOCK):
        found = os.pread(handle, _BLOCK + len(_MAGIC) - 1, offset).find(_MAGIC)
        if found >= 0:
            return offset + found
    return size


def _record(body: bytes, where: str) -> Any:
    with _memory_file() as file:  # a Reader reads files
        file.write(body)
        file.flush()
        return unpacker(container.Reader(file, where)).root("record")


def _memory_file() -> Any:
    """A file in memory if the system has them: they need no usable TMPDIR."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("rlskip-journal"), "w+b")
    return tempfile.TemporaryFile()


def _is_at(path: Path, file: IO[bytes]) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(file.fileno()))
    except OSError:
        return False


def _lock(file: IO[bytes], kind: int) -> bool:
    """Whether a lock was taken; true on file systems without locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
