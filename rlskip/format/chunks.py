"""Arrays cut into chunks, narrowed, compressed, and back.

A *spec* names the elements of an array: ``i``, ``u`` (integers) or ``x`` (opaque, kept unchanged),
and the bytes of one, e.g. ``u2``.
"""

from __future__ import annotations

import logging
import random
import struct
from collections.abc import Sequence

import attrs
import numpy as np

from rlskip._copies import Memory, share

_numexpr = logging.getLogger("numexpr.utils")
_numexpr.addFilter(_drop := lambda record: False)
_state = random.getstate()  # the trainer's, who may have seeded it already
try:
    import blosc2  # imports numexpr, which logs the number of its threads, and rich, which draws
finally:
    _numexpr.removeFilter(_drop)
    random.setstate(_state)

CHUNK = 1 << 21  # bytes before it is stored: large for Python, small for a core's cache

_SIZES = (1, 2, 4, 8)
STORED_AS = {
    f"{kind}{size}": {f"{kind}{size}", *(f"{k}{s}" for s in _SIZES if s < size for k in narrower)}
    for kind, narrower in {"i": "ui", "u": "u", "x": ""}.items()
    for size in _SIZES
}
"""The specs of arrays, each with those that it may be stored as."""

# By the size of an element; wider ones are shuffled by bits.
_FILTERS = {"1": blosc2.Filter.NOFILTER, "2": blosc2.Filter.SHUFFLE}

# While one thread compresses, the training thread must be able to run.
blosc2.set_releasegil(True)


@attrs.frozen(eq=False)
class Array:
    """A run of equal elements to store; `spec` says as what they must come back.

    `parts` are contiguous 1-D arrays of a chunk each. Integers may already be narrower than `spec`.
    `owned`: no other code will change their memory.
    """

    spec: str
    parts: Sequence[np.ndarray]
    owned: bool = False

    @classmethod
    def of(cls, data: np.ndarray, spec: str, owned: bool = False) -> Array:
        """Views of 1-D contiguous `data`; copies nothing."""
        step = CHUNK // int(spec[1])
        return cls(spec, [data[i : i + step] for i in range(0, len(data), step)], owned)

    @property
    def nbytes(self) -> int:
        return int(self.spec[1]) * sum(map(len, self.parts))


def _extremes(part: np.ndarray) -> tuple[int, int]:
    """The ends of what a part holds; the least counts if it is negative."""
    # One pass suffices unless something is negative: as unsigned, that is huge.
    high = int(part.view(f"u{part.itemsize}").max())
    if part.dtype.kind == "i" and high >= 1 << (8 * part.itemsize - 1):
        return int(part.min()), int(part.max())
    return 0, high


def narrowest(array: Array) -> str:
    """The narrowest spec that holds all of an array."""
    if len(STORED_AS[array.spec]) == 1:
        return array.spec
    lows, highs = zip((0, 0), *share(_extremes, array.parts), strict=True)
    low, high = min(lows), max(highs)
    fitting = np.min_scalar_type(min(low, ~high) if low < 0 else high)
    is_narrower = fitting.itemsize < int(array.spec[1])
    return f"{fitting.kind}{fitting.itemsize}" if is_narrower else array.spec


def copied(arrays: Sequence[Array], memory: Memory) -> list[Array]:
    """The arrays, narrowed, in memory that no other code changes."""
    jobs, copies = [], []
    for array in arrays:
        if array.owned:
            copies.append(array)
            continue
        room, parts = memory(array.nbytes), [*array.parts]
        copies.append(Array(array.spec, parts, owned=True))
        jobs += [(parts, i, array.spec, room[i * CHUNK :]) for i in range(len(parts))]

    def copy(job: tuple[list[np.ndarray], int, str, np.ndarray]) -> None:
        parts, i, spec, room = job
        part = parts[i]
        dtype = part.dtype if spec[0] == "x" else np.dtype(narrowest(Array(spec, [part])))
        # What is not written to never takes a page.
        parts[i] = room[: len(part) * dtype.itemsize].view(dtype)
        np.copyto(parts[i], part, casting="unsafe")

    share(copy, jobs)
    return copies


def pack(part: np.ndarray, spec: str) -> bytes:
    """A part as one compressed run of elements of `spec`: a chunk of Blosc2, header of 32 bytes."""
    if part.itemsize != int(spec[1]):
        part = part.astype(spec)
    return blosc2.compress2(  # type: ignore[no-any-return]
        part,
        codec=blosc2.Codec.LZ4,
        clevel=5,
        typesize=part.itemsize,
        filters=[_FILTERS.get(spec[1], blosc2.Filter.BITSHUFFLE)],
        filters_meta=[0],
        blocksize=1 << 18,
        nthreads=1,
    )


# A chunk's header, from README_CHUNK_FORMAT of c-blosc2. Other special values than zeros stand for
# memory left as it was, or for bytes of another file.
_HEADER = struct.Struct("<2xBBi4xiB5sB7xBB")
_LZ4, _STORED, _ALL_ZERO = 1, 0x02, 0x10


def unpack(packed: bytes, spec: str, out: np.ndarray, out_spec: str) -> None:
    """Restore a run of `spec` into the bytes `out`, elements of `out_spec`.

    Raises ValueError where it is not a run of that size as :func:`pack` makes them, and
    RuntimeError where the decompressor fails, for example for lack of memory.
    """
    if spec != out_spec:
        wide = out.view(out_spec)
        narrow = np.empty(len(wide) * int(spec[1]), np.uint8)
        unpack(packed, spec, narrow, spec)
        np.copyto(wide, narrow.view(spec), casting="unsafe")
        return
    # Blosc2 takes the length to write from the run's header, and loads plug-ins for codecs and
    # filters that it does not know. Neither is left to the file.
    if len(packed) < _HEADER.size:
        raise ValueError("a compressed run has no header")
    header = _HEADER.unpack_from(packed)
    flags, typesize, nbytes, cbytes, last_filter, other_filters, codec, flags2, special = header
    if (
        nbytes != out.nbytes
        or not _HEADER.size <= cbytes <= len(packed)
        or typesize != int(spec[1])
        or not (flags & _STORED or flags >> 5 == _LZ4)
        or last_filter not in (0, 1, 2)
        or other_filters != bytes(5)
        or codec not in (0, _LZ4)
        or flags2 != 0
        or special not in (0, _ALL_ZERO)
    ):
        raise ValueError("a compressed run does not match the index")
    blosc2.decompress2(memoryview(packed)[:cbytes], out, nthreads=1)
