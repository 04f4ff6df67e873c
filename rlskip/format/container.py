"""The file of a dump: trees of JSON over compressed, checksummed arrays.

::

    head    16 bytes   magic, format version
    chunks             compressed runs of the arrays, back to back, in order
    index              the trees, what the arrays are, checksums of the chunks: JSON, compressed
    tail    40 bytes   length of the index stored and plain, its checksum, closing magic

Not one Blosc2 frame an array: before Blosc2, which loads plug-ins by id, may open a frame, all of
it would have to be parsed here, and building one copies each chunk twice (``benchmarks.store``).

Nothing that is read is trusted. What a file declares is compared with its size and `max_bytes`
before it is allocated, and a compressed run with the index before the decompressor sees it.
"""

from __future__ import annotations

import functools
import json
import os
import struct
from collections.abc import Collection, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash

from rlskip._copies import fresh, share
from rlskip.config.max_bytes import half_of_memory
from rlskip.format import chunks
from rlskip.format.chunks import CHUNK, STORED_AS, Array
from rlskip.format.dump_errors import (
    VERSION,
    CorruptDumpError,
    TooLargeDumpError,
    UnreadableDumpError,
    check_version,
)

MAX_RATIO = 1024  # a file declares at most so many times its size; a smaller one is padded
FLOOR = 64 << 20  # bytes that a file may declare however small it is
_PARSED = 26  # bytes in memory, at most, for a byte of JSON

_HEAD = struct.Struct("<8sII")
_TAIL = struct.Struct("<QQ16s8s")
_MAGIC = b"rlskip\r\n"
_END = b"\r\nend\r\n\x00"
_BATCH = 16  # chunks packed before they are written


def write(file: BinaryIO, index: dict[str, Any], arrays: Sequence[Array]) -> str:
    """Write a dump's file and return its checksum; `index` is any JSON without ``arrays``."""
    file.write(_HEAD.pack(_MAGIC, VERSION, 0))
    listing = []
    for array in arrays:
        stored_as = chunks.narrowest(array)
        pack = functools.partial(chunks.pack, spec=stored_as)
        runs: list[tuple[int, str]] = []
        for start in range(0, len(array.parts), _BATCH):
            for run in share(pack, array.parts[start : start + _BATCH]):
                runs.append((len(run), xxhash.xxh3_128_hexdigest(run)))
                file.write(run)
        listing.append((array.nbytes, array.spec, stored_as, runs))
    nbytes = sum(array.nbytes for array in arrays)
    plain = json.dumps({**index, "arrays": listing}, separators=(",", ":")).encode()
    stored = chunks.pack(np.frombuffer(plain, np.uint8), "x1")
    if nbytes + len(plain) > FLOOR:
        least = -(-(nbytes + len(plain)) // MAX_RATIO)
        stored = stored.ljust(least - file.tell() - _TAIL.size, b"\0")
    digest = xxhash.xxh3_128_digest(stored)
    file.write(stored)
    file.write(_TAIL.pack(len(stored), len(plain), digest, _END))
    return digest.hex()


class _Entry(NamedTuple):
    nbytes: int
    spec: str
    stored_as: str
    chunks: list[tuple[int, int, str]]  # where it begins, its size, its checksum


class Reader:
    """A dump's file, opened: the index verified, the arrays read when they are asked for.

    `source` is its bytes, or a real file, open until the arrays are read; `checksum` the one in
    ``meta.json``. The values may take `max_bytes` of memory, by default half of what there is.
    Raises CorruptDumpError, OtherFormatError or TooLargeDumpError, as do its methods.
    """

    def __init__(
        self,
        source: BinaryIO | bytes,
        where: str,
        checksum: str | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self._source = source if isinstance(source, bytes) else source.fileno()
        self.where = where
        size = len(source) if isinstance(source, bytes) else os.fstat(source.fileno()).st_size
        if size < _HEAD.size + _TAIL.size:
            raise self._corrupt(f"{size} bytes are too few for a dump")
        if size <= CHUNK:  # at once: a small one is mostly looks at its parts
            self._source = self._read(0, size)
        magic, version, reserved = _HEAD.unpack(self._read(0, _HEAD.size))
        if magic != _MAGIC:
            raise self._corrupt("not a dump of rlskip (and no pickle is ever read)")
        check_version(version, where)
        stored, plain, digest, end = _TAIL.unpack(self._read(size - _TAIL.size, _TAIL.size))
        most, start = max(FLOOR, MAX_RATIO * size), size - _TAIL.size - stored
        if reserved or end != _END or start < _HEAD.size or plain > most:
            raise self._corrupt("its end is missing or altered")
        if checksum is not None and digest.hex() != checksum:
            raise self._corrupt("its checksum is not the one in meta.json")
        self._max_bytes = half_of_memory() if max_bytes is None else max_bytes
        self._left = self._max_bytes
        self.charge(_PARSED * plain)
        packed = self._read(start, stored)
        if xxhash.xxh3_128_digest(packed) != digest:
            raise self._corrupt("its index is altered")
        self.index = self._parse(packed, plain)
        #: Arrays whose integers come as narrow as they are stored (:meth:`array`).
        self.narrow: Collection[int] = ()
        self._verified: set[int] = set()
        self._fetched: dict[int, np.ndarray] = {}
        self._entries = self._parse_entries(start)
        expanded = plain + sum(entry.nbytes for entry in self._entries)
        #: Whether it takes so little that nothing of it is worth a second thread.
        self.is_small = expanded <= CHUNK
        if expanded > most:
            raise self._corrupt("it expands to more than a file of its size may")

    def charge(self, nbytes: int) -> None:
        """Raise TooLargeDumpError if with `nbytes` more its values take more than `max_bytes`."""
        self._left -= nbytes
        if self._left < 0:
            what = f"its values take more than {self._max_bytes} bytes of memory (max_bytes)"
            remedy = (
                "allow more, if the process has it: skip.max_bytes; RLSKIP_MAX_BYTES=BYTES before "
                "rlskip.open or a command; or by hand StepStore(directory, max_bytes=...)"
            )
            raise TooLargeDumpError(what, self.where, remedy)

    def nbytes(self, number: int) -> int:
        """The size of array `number`."""
        if type(number) is not int or not 0 <= number < len(self._entries):
            raise self._corrupt(f"it has no array {number!r:.60}")
        return self._entries[number].nbytes

    def array(self, number: int) -> np.ndarray:
        """Array `number`, verified, as bytes in new memory.

        Narrow integers have their own dtype, whose ``metadata["of"]`` is the array's spec.
        """
        self.nbytes(number)  # is it one?
        if number not in self._fetched:
            self.fetch([number])
        return self._fetched.pop(number)

    def fetch(self, numbers: Collection[int]) -> None:
        """Read these before they are asked for, and all together: two threads share the chunks."""
        found, jobs = dict[int, np.ndarray](), []
        for number in numbers:
            nbytes, whole, stored_as, listed = self._entries[number]
            spec = stored_as if number in self.narrow else whole
            times = int(whole[1]) // int(spec[1])
            self.charge(nbytes // times)
            out, step = fresh(nbytes // times), CHUNK // times
            for i, chunk in enumerate(listed):
                jobs.append((chunk, stored_as, out[i * step : (i + 1) * step], spec))
            if times > 1:
                out = out.view(np.dtype(spec, metadata={"of": whole}))  # type: ignore[call-overload]
            found[number] = out
        share(lambda job: self._expand(self._chunk(*job[0]), *job[1:]), jobs)
        self._fetched |= found
        self._verified |= found.keys()

    def verify(self) -> None:
        """Compare the arrays not yet read with their checksums."""
        for number, entry in enumerate(self._entries):
            if number not in self._verified:
                for chunk in entry.chunks:
                    self._chunk(*chunk)

    def _chunk(self, offset: int, size: int, checksum: str) -> bytes:
        packed = self._read(offset, size)
        if xxhash.xxh3_128_hexdigest(packed) != checksum:
            raise self._corrupt(f"the {size} bytes at {offset} are altered")
        return packed

    def _expand(self, packed: bytes, stored_as: str, out: np.ndarray, spec: str) -> None:
        try:
            chunks.unpack(packed, stored_as, out, spec)
        except ValueError as error:
            raise self._corrupt(str(error)) from error
        except RuntimeError as error:
            raise UnreadableDumpError.by_process(error, self.where) from error

    def _parse(self, packed: bytes, plain: int) -> dict[str, Any]:
        text = bytearray(plain)
        self._expand(packed, "x1", np.frombuffer(text, np.uint8), "x1")
        try:
            index = json.loads(text)
        except ValueError as error:
            raise self._corrupt("its index cannot be read") from error
        except RecursionError as error:
            raise UnreadableDumpError.by_process(error, self.where) from error
        if not isinstance(index, dict):
            raise self._corrupt("its index is not a mapping")
        return index

    def _parse_entries(self, end: int) -> list[_Entry]:
        """The arrays as the index lists them; together they fill the file exactly."""
        entries, offset = [], _HEAD.size
        try:
            for nbytes, spec, stored_as, listed in self.index.pop("arrays"):
                sound = stored_as in STORED_AS[spec] and type(nbytes) is int
                sound = sound and nbytes >= 0 and nbytes % int(spec[1]) == 0
                found = []
                for size, checksum in listed:
                    sound = sound and type(size) is int and size > 0
                    found.append((offset, size, checksum))
                    offset += size
                if not sound or len(found) != -(-nbytes // CHUNK):
                    raise ValueError(spec)
                entries.append(_Entry(nbytes, spec, stored_as, found))
            if offset != end:
                raise ValueError(offset)
        except (LookupError, TypeError, ValueError) as error:
            raise self._corrupt("its index does not fit it") from error
        return entries

    def _read(self, offset: int, size: int) -> bytes:
        # Several threads read at once, so a file's own position is not used.
        if isinstance(self._source, bytes):
            data = self._source[offset : offset + size]
        else:
            data = os.pread(self._source, size, offset)
        if len(data) != size:
            raise self._corrupt("it ends too early")
        return data

    def _corrupt(self, what: str) -> CorruptDumpError:
        return CorruptDumpError(what, where=self.where)
