"""The file of a dump: trees of JSON over compressed, checksummed arrays.

::

    head    16 bytes   magic, format version
    pieces             compressed runs of the arrays, back to back, in order
    index              the trees, and what the pieces are: JSON, compressed
    tail    40 bytes   length of the index stored and plain, its checksum, closing magic

Every byte is covered: the pieces by their checksums in the index, the index by the one in the
tail, and that one by ``meta.json``. So the tail's checksum stands for the whole file, and
still any one array can be verified and read without the others.

Nothing here knows what the trees mean (:mod:`rlskip.store.codec` does). Nothing read is
trusted: a file of S bytes never makes the reader allocate more than ``MAX_RATIO * S``, and a
compressed run must declare exactly what is expected before the decompressor sees it.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO

import attrs
import numpy as np
import xxhash

from rlskip.store import pieces
from rlskip.store.errors import CorruptDumpError, NewerFormatError
from rlskip.store.memory import memory
from rlskip.store.pieces import INTEGERS, MAX_RATIO, NARROW, PIECE, SPECS, Array

VERSION = 1
INDEX_RATIO = 32
"""As MAX_RATIO, for the index: parsed it takes several times its size."""

_HEAD = struct.Struct("<8sII")
_TAIL = struct.Struct("<QQ16s8s")
_MAGIC = b"rlskip\r\n"
_END = b"\r\nend\r\n\x00"
_BATCH = 6  # pieces packed before they are written


# -- writing -----------------------------------------------------------------------------


def write(file: BinaryIO, index: dict[str, Any], arrays: Sequence[Array]) -> str:
    """Write a dump's file and return its checksum.

    `index` is any JSON; the key ``arrays`` is ours. Beside `arrays` only a few pieces are
    held at a time.
    """
    file.write(_HEAD.pack(_MAGIC, VERSION, 0))
    listing: list[tuple[int, str, list]] = [(a.nbytes, a.spec, []) for a in arrays]
    parts = [(i, part) for i, array in enumerate(arrays) for part in array.parts]
    packed: list[tuple[str, bytes]] = []

    def do(job: tuple[int, np.ndarray] | None) -> tuple[str, bytes]:
        if job is None:
            file.writelines(blob for _, blob in packed)
            return "", b""
        i, part = job
        return pieces.pack(arrays[i], part)

    for start in range(0, len(parts), _BATCH):
        batch = parts[start : start + _BATCH]
        # The batch before is written while this one is packed.
        _, *packed = pieces.share(do, [None, *batch])
        for (i, _), (spec, blob) in zip(batch, packed, strict=True):
            listing[i][2].append((len(blob), spec, xxhash.xxh3_128_hexdigest(blob)))
    do(None)
    plain = json.dumps({**index, "arrays": listing}, separators=(",", ":")).encode()
    stored = pieces.squeeze(np.frombuffer(plain, np.uint8), "x1")
    stored = stored.ljust(-(-len(plain) // INDEX_RATIO), b"\0")
    digest = xxhash.xxh3_128_digest(stored)
    file.write(stored)
    file.write(_TAIL.pack(len(stored), len(plain), digest, _END))
    return digest.hex()


# -- reading -----------------------------------------------------------------------------


@attrs.frozen
class _Piece:
    offset: int
    size: int
    spec: str
    checksum: str


@attrs.frozen
class _Entry:
    nbytes: int
    spec: str
    pieces: list[_Piece]


class Reader:
    """A dump's file, opened: the index verified, the arrays read one by one.

    Parameters
    ----------
    file
        A real file, open for reading in binary until the arrays are read.
    where
        The path to name in errors.
    checksum
        The one in ``meta.json``: a file with another is not the one that was written.

    Raises
    ------
    CorruptDumpError
        The file is truncated, altered, or no dump at all.
    NewerFormatError
        A newer rlskip wrote it.
    """

    def __init__(self, file: BinaryIO, where: str, checksum: str | None = None) -> None:
        self._handle = file.fileno()
        self.where = where
        size = os.fstat(self._handle).st_size
        room = size - _HEAD.size - _TAIL.size
        if room < 0:
            raise self._corrupt(f"{size} bytes are too few for a dump")
        magic, version, reserved = _HEAD.unpack(self._read(0, _HEAD.size))
        if magic != _MAGIC:
            raise self._corrupt("not a dump of rlskip (and no pickle is ever read)")
        check_version(version, where)
        stored, plain, digest, end = _TAIL.unpack(self._read(size - _TAIL.size, _TAIL.size))
        if reserved or end != _END or stored > room or plain > stored * INDEX_RATIO:
            raise self._corrupt("its end is missing or altered")
        if checksum is not None and digest.hex() != checksum:
            raise self._corrupt("its checksum is not the one in meta.json")
        self.checksum: str = digest.hex()
        packed = self._read(size - _TAIL.size - stored, stored)
        if xxhash.xxh3_128_digest(packed) != digest:
            raise self._corrupt("its index is altered")
        self.index = self._parse(packed, plain)
        self._verified: set[int] = set()
        self._ready: dict[int, np.ndarray] = {}
        self._entries = self._parse_entries(_HEAD.size, size - _TAIL.size - stored)

    @property
    def nbytes(self) -> int:
        """Size of all arrays in memory."""
        return sum(entry.nbytes for entry in self._entries)

    def array(self, number: int) -> np.ndarray:
        """Array `number`, verified, as bytes that nobody else has."""
        if type(number) is not int or not 0 <= number < len(self._entries):
            raise self._corrupt(f"it has no array {number!r}")
        if number not in self._ready:
            self._load([number])
        return self._ready.pop(number)

    def expand_all(self) -> None:
        """Verify and expand all arrays at once, for :meth:`array` to hand out.

        Sooner done than one by one: the threads part and meet once, not once per array.
        """
        self._load(range(len(self._entries)))

    def verify(self) -> None:
        """Compare every array not yet read with its checksum; nothing is decompressed."""
        for number, entry in enumerate(self._entries):
            if number not in self._verified:
                for piece in entry.pieces:
                    self._piece(piece)

    def _load(self, numbers: Iterable[int]) -> None:
        """Expand these arrays into memory of their own, all their pieces as one lot of work."""
        jobs = []
        for number in numbers:
            entry = self._entries[number]
            small = entry.nbytes < 8 * PIECE  # its last page may be zeroed beyond its end
            out = np.empty(entry.nbytes, np.uint8) if small else memory.take(entry.nbytes)
            self._ready[number] = out
            self._verified.add(number)
            jobs += [
                (piece, out[i * PIECE : (i + 1) * PIECE], entry.spec)
                for i, piece in enumerate(entry.pieces)
            ]

        def restore(job: tuple[_Piece, np.ndarray, str]) -> None:
            piece, part, spec = job
            packed = self._piece(piece)
            try:
                pieces.unpack(packed, piece.spec, part, spec)
            except ValueError as error:
                raise self._corrupt(str(error)) from error

        # A second thread costs more of the interpreter than it saves on a few small arrays.
        pieces.share(restore, jobs, alone=sum(len(part) for _, part, _ in jobs) < 2 * PIECE)

    def _piece(self, piece: _Piece) -> bytes:
        packed = self._read(piece.offset, piece.size)
        if xxhash.xxh3_128_hexdigest(packed) != piece.checksum:
            raise self._corrupt(f"the {piece.size} bytes at {piece.offset} are altered")
        return packed

    def _parse(self, packed: bytes, plain: int) -> dict[str, Any]:
        text = np.empty(plain, np.uint8)
        try:
            pieces.expand(packed, text, "x1")
            index = json.loads(text.tobytes())
        except (ValueError, RecursionError) as error:
            raise self._corrupt("its index cannot be read") from error
        if not isinstance(index, dict):
            raise self._corrupt("its index is no mapping")
        return index

    def _parse_entries(self, start: int, end: int) -> list[_Entry]:
        """The arrays as the index lists them; together they fill the file exactly."""
        entries, offset = [], start
        try:
            for nbytes, spec, listed in self.index.pop("arrays"):
                pieces = []
                for size, stored, checksum in listed:
                    pieces.append(_Piece(offset, size, stored, checksum))
                    offset += size
                entries.append(_Entry(nbytes, spec, pieces))
            sound = offset == end and all(map(_is_sound, entries))
        except (KeyError, TypeError, ValueError):
            sound = False
        if not sound:
            raise self._corrupt("its index does not fit it")
        return entries

    def _read(self, offset: int, size: int) -> bytes:
        data = os.pread(self._handle, size, offset)
        if len(data) != size:
            raise self._corrupt("it ends too early")
        return data

    def _corrupt(self, what: str) -> CorruptDumpError:
        return CorruptDumpError(what, where=self.where)


def _is_sound(entry: _Entry) -> bool:
    return (
        type(entry.nbytes) is int
        and entry.nbytes >= 0
        and entry.spec in SPECS
        and entry.nbytes % int(entry.spec[1]) == 0
        and len(entry.pieces) == -(-entry.nbytes // PIECE)
        and all(type(piece.size) is int and piece.size > 0 for piece in entry.pieces)
        and entry.nbytes <= MAX_RATIO * sum(piece.size for piece in entry.pieces)
        and all(
            piece.spec == entry.spec or (entry.spec in INTEGERS and piece.spec in NARROW)
            for piece in entry.pieces
        )
    )


def check_version(version: object, where: str) -> None:
    """Refuse what is not of our format; the error says what follows."""
    if type(version) is not int or version < 0:
        raise CorruptDumpError(f"{version!r} is no format version", where=where)
    if version == 0:
        raise CorruptDumpError(
            "a dump of format 0, which no release ever wrote; it cannot be read", where=where
        )
    if version > VERSION:
        raise NewerFormatError(
            f"a dump of format {version}; this rlskip reads up to {VERSION}",
            where=where,
            remedy="install the rlskip that wrote it or a newer one: pip install -U rlskip",
        )
