"""Arrays cut into chunks, narrowed, compressed, and back.

A *spec* names the elements of an array: ``i``, ``u`` (integers) or ``x`` (opaque), and the bytes of
one, e.g. ``u2``. The integers of an array are stored in the narrowest spec that holds them all.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Sequence, Set

import attrs
import numpy as np

from rlskip._copies import Memory, share

_numexpr = logging.getLogger("numexpr.utils")
_numexpr.addFilter(_drop := lambda record: False)
try:
    import blosc2  # imports numexpr, which logs the number of its threads
finally:
    _numexpr.removeFilter(_drop)

CHUNK = 1 << 21
"""Bytes of a chunk before it is stored: large for Python, small for a core's cache."""

_SIZES = (1, 2, 4, 8)
_NARROWER = {
    family: [(size, f"{family}{size}", np.iinfo(f"{family}{size}")) for size in _SIZES[:-1]]
    for family in "iu"
}
STORED_AS = {
    f"{kind}{size}": {f"{kind}{size}"}
    | {f"{k}{s}" for k in {"i": "iu", "u": "u", "x": ""}[kind] for s in _SIZES if s < size}
    for kind in "iux"
    for size in _SIZES
}
"""The specs of arrays, each with those that it may be stored as: narrower integers."""

# By the size of an element; wider ones are shuffled by bits.
_FILTERS = {"1": blosc2.Filter.NOFILTER, "2": blosc2.Filter.SHUFFLE}

# While one thread compresses, the training thread must be able to run.
blosc2.set_releasegil(True)


@attrs.frozen(eq=False)
class Array:
    """A run of equal elements to store.

    Parameters
    ----------
    kind
        ``i`` or ``u`` for integers, which are stored in the narrowest type that holds them; ``x``
        for opaque elements, whose bytes are kept unchanged.
    itemsize
        Bytes of an element as it must come back: 1, 2, 4 or 8.
    parts
        Contiguous 1-D arrays of ``CHUNK // itemsize`` elements each; the last may be shorter.
        Integers may already be narrower than `itemsize`.
    owned
        Whether no other code will change the parts' memory.
    """

    kind: str
    itemsize: int
    parts: Sequence[np.ndarray]
    owned: bool = False

    @classmethod
    def of(
        cls, data: np.ndarray, kind: str, owned: bool = False, itemsize: int | None = None
    ) -> Array:
        """Views of 1-D contiguous `data`, which may be narrower than `itemsize`; copies nothing."""
        itemsize = itemsize or data.itemsize
        step = CHUNK // itemsize
        parts = [data[i : i + step] for i in range(0, len(data), step)]
        return cls(kind, itemsize, parts, owned)

    @property
    def nbytes(self) -> int:
        return self.itemsize * sum(map(len, self.parts))

    @property
    def spec(self) -> str:
        return f"{self.kind}{self.itemsize}"

    @property
    def copy_nbytes(self) -> int:
        """The most bytes that :func:`copied` takes from its arena."""
        return 0 if self.owned else sum(aligned(part.nbytes) for part in self.parts)

    def copy(self, part: np.ndarray, arena: Memory) -> np.ndarray:
        """A part in the narrowest integers that hold it, in `arena`'s memory."""
        narrowed = _as(self.fitting(part), part, arena)
        if narrowed is part:
            narrowed = arena(part.nbytes).view(part.dtype)
            np.copyto(narrowed, part)
        return narrowed

    def fitting(self, part: np.ndarray) -> str:
        """The narrowest spec that holds a part."""
        spec = self.spec if self.kind == "x" else f"{part.dtype.kind}{part.itemsize}"
        if self.kind == "x" or part.itemsize < self.itemsize or self.itemsize == 1:
            return spec
        # One pass suffices unless something is negative: as unsigned, that is huge.
        low, high = 0, int(part.view(f"u{part.itemsize}").max())
        if part.dtype.kind == "i" and high >= 1 << (8 * part.itemsize - 1):
            low, high = int(part.min()), int(part.max())
        for size, narrow, bounds in _NARROWER["u" if low >= 0 else "i"]:
            if size < part.itemsize and bounds.min <= low and high <= bounds.max:
                return narrow
        return spec

    def stored_as(self, specs: Set[str]) -> str:
        """The narrowest spec that holds parts of all these; it is that of the array's chunks."""
        fitting = [spec for spec in STORED_AS[self.spec] if specs <= STORED_AS[spec]]
        return min(fitting, key=lambda spec: spec[1]) if specs else self.spec


def _as(spec: str, part: np.ndarray, memory: Memory) -> np.ndarray:
    """A part as elements of `spec`, converted in `memory`; the part itself if it is of that."""
    size = int(spec[1])
    if size == part.itemsize:
        return part
    converted = memory(len(part) * size).view(spec)
    np.copyto(converted, part, casting="unsafe")
    return converted


def copied(arrays: Sequence[Array], arena: Memory) -> list[Array]:
    """The arrays, narrowed, in memory that no other code changes."""
    parts = [(array, part) for array in arrays if not array.owned for part in array.parts]
    copies = iter(share(lambda job: job[0].copy(job[1], arena), parts))
    return [
        array
        if array.owned
        else attrs.evolve(array, parts=[next(copies) for _ in array.parts], owned=True)
        for array in arrays
    ]


def aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


class _Scratch(threading.local):
    """A chunk's memory per thread, so that no chunk touches fresh pages."""

    def __init__(self) -> None:
        self._memory = np.empty(CHUNK, np.uint8)

    def __call__(self, nbytes: int) -> np.ndarray:
        return self._memory[:nbytes]


scratch = _Scratch()


def pack(part: np.ndarray, spec: str) -> bytes:
    """A part as it is stored, as elements of `spec`."""
    return squeeze(_as(spec, part, scratch), spec)


def unpack(packed: bytes, spec: str, out: np.ndarray, out_spec: str) -> None:
    """Restore a chunk stored as `spec` into the bytes `out`, elements of `out_spec`.

    Raises
    ------
    ValueError
        It is not a chunk of that size as :func:`pack` makes them.
    """
    if spec == out_spec:
        expand(packed, out, spec)
    else:
        wide = out.view(out_spec)
        narrow = scratch(len(wide) * int(spec[1]))
        expand(packed, narrow, spec)
        np.copyto(wide, narrow.view(spec), casting="unsafe")


def squeeze(data: np.ndarray, spec: str) -> bytes:
    """One compressed run: a Blosc2 chunk with a header of 32 bytes."""
    packed: bytes = blosc2.compress2(
        data,
        codec=blosc2.Codec.LZ4,
        clevel=5,
        typesize=data.itemsize,
        filters=[_FILTERS.get(spec[1], blosc2.Filter.BITSHUFFLE)],
        filters_meta=[0],
        blocksize=1 << 18,
        nthreads=1,
    )
    return packed


# Values in a chunk's header, from README_CHUNK_FORMAT of c-blosc2. Other special values than zeros
# stand for memory left as it was, or for bytes of another file.
_LZ4, _STORED, _ALL_ZERO = 1, 0x02, 0x10


def expand(packed: bytes, out: np.ndarray, spec: str) -> None:
    """Decompress a run into the bytes `out`, if its header is as :func:`squeeze` writes it.

    Raises
    ------
    ValueError
        The header is not as :func:`squeeze` writes it.
    RuntimeError
        The decompressor fails, for example for lack of memory.
    """
    # Blosc2 takes the length to write from the run's header, and loads plug-ins for codecs and
    # filters that it does not know. Neither is left to the file.
    if len(packed) < 32:
        raise ValueError("a compressed run has no header")
    flags, nbytes, cbytes = packed[2], *struct.unpack_from("<i4xi", packed, 4)
    if (
        nbytes != out.nbytes
        or not 32 <= cbytes <= len(packed)
        or packed[3] != int(spec[1])
        or not (flags & _STORED or flags >> 5 == _LZ4)
        or packed[16] not in (0, 1, 2)
        or any(packed[17:22])
        or packed[22] not in (0, _LZ4)
        or packed[30] != 0
        or packed[31] not in (0, _ALL_ZERO)
    ):
        raise ValueError("a compressed run does not match the index")
    blosc2.decompress2(memoryview(packed)[:cbytes], out, nthreads=1)
