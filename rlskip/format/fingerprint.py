"""The fingerprint of a value: a hash of its content, whatever kind of batch it is."""

from __future__ import annotations

import contextlib
import enum
import json
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import xxhash

from rlskip.batch.columns import (
    columns_of,
    is_data_proto,
    is_lazy,
    is_tensor,
    is_wrapped,
    unwrapped,
)
from rlskip.batch.tables import loaded
from rlskip.format.codec import Walk
from rlskip.format.dump_errors import UnsupportedTypeError, text_of
from rlskip.format.kinds import Packer

VOLATILE = frozenset(
    ("uid", "uids", "request_id", "request_ids", "sample_id", "global_step", "global_steps",
     "meta_info", "timing", "timestamp", "timestamps", "created", "created_at", "updated_at")
)  # fmt: skip
"""Fields of a batch that record when it was made, not what is in it.

They do not count in the dicts of the field ``extra_info`` either.
"""
NOTES = "extra_info"

_REMEDY = (
    "leave it out of the comparison: annotate(prompts=...) names the argument that holds the "
    "prompts, or computes them; or register a codec for its type: "
    "rlskip.store.register_codec(type, name, encode, decode)"
)
_APART = object()
"""In a path, what has no key: an item of a set, or a key itself."""
# The bits of infinity: those of NaN are larger.
_INFINITY = {
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float32": 0x7F80_0000,
    "float64": 0x7FF0_0000_0000_0000,
}
_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def fingerprint(prompts: Any, volatile: Iterable[str] = VOLATILE) -> str:
    """Content hash of prompts of any kind that dumps can store.

    Two values have one fingerprint if their values, dtypes and shapes are equal. These do not
    count: the order of a mapping's keys, devices, strides, byte order, the width of text in arrays,
    what an image notes besides its pixels, and the `volatile` fields of the outermost mapping, or
    of its rows if the outermost is a sequence of mappings.

    A tensor is equal to a numpy array; a scalar of Python to one of numpy and to a 0-d tensor of
    that value, whatever its width; lists, tuples and 1-D object arrays to each other; a jagged
    tensor to the list of its rows; a DataProto and a TensorDict, lazy or not, to the mapping of
    their columns. int32 prompts are not int64 prompts. NaN is equal to itself, and 0.0 to -0.0.

    Returns
    -------
    str
        32 hexadecimal digits.

    Raises
    ------
    UnsupportedTypeError
        A part of the prompts cannot be compared; the error names its place.
    """
    path: list[tuple[Any, Any]] = []
    hasher = _Hasher(Walk(), path)
    try:
        hasher.feed(without_volatile(frozenset(volatile), prompts))
    except MemoryError:
        raise
    except Exception as error:
        places = (f"[{place!r}]" for place, _ in path if place is not _APART)
        where = f"prompts{''.join(places)}"
        kind = type(path[-1][1] if path else prompts)
        what = f"cannot compare a {kind.__module__}.{kind.__qualname__}: {text_of(error)}"
        if isinstance(error, UnsupportedTypeError):
            what, where = error.what, f"{where}{error.where}"
        where = where if len(where) <= 200 else f"{where[:200]}..."
        raise UnsupportedTypeError(what, where, _REMEDY) from error
    return hasher.hexdigest()


def without_volatile(volatile: frozenset[str], prompts: Any) -> Any:
    if is_data_proto(prompts) or _is_mapping(prompts):
        return {
            key: without_volatile(volatile, value) if key == NOTES else value
            for key, value in columns_of(prompts).items()
            if key not in volatile
        }
    rows = [unwrapped(row) for row in _rows(prompts)] if _is_sequence(prompts) else []
    if rows and all(map(_is_mapping, rows)):
        return [without_volatile(volatile, row) for row in rows]
    return prompts


# -- what a value is -----------------------------------------------------------------------


def _is_mapping(value: Any) -> bool:
    if isinstance(value, loaded("tensordict", "NonTensorStack")):
        return False
    if is_lazy(value):
        # Of any other stack, tensordict shows only the keys that all parts have.
        return len({frozenset(part.keys(True, True)) for part in value.tensordicts}) == 1
    return isinstance(value, Mapping)


def _is_sequence(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype == object and (value.size > 0 or value.ndim == 1)
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
    return is_list or is_lazy(value)


def _rows(value: Any) -> Sequence[Any]:
    return value.tensordicts if is_lazy(value) else [*value]


def _is_row(value: Any) -> bool:
    """Whether `value` is what a row of a jagged tensor is."""
    is_array = isinstance(value, np.ndarray) and value.dtype != object
    return (is_array or (is_tensor(value) and not value.is_nested)) and value.ndim > 0


def _is_of(package: str, value: Any) -> bool:
    """Whether the class of `value` is the package's; a subclass elsewhere may add content."""
    is_masked = isinstance(value, np.ma.MaskedArray)
    return type(value).__module__.split(".")[0] in (package, "tensordict") and not is_masked


def scalar_of(value: Any) -> Any:
    """A scalar of numpy, a 0-d array or a 0-d tensor as Python's scalar of its value."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    is_masked = isinstance(value, np.ma.MaskedArray)
    if isinstance(value, np.ndarray | np.generic) and value.ndim == 0 and not is_masked:
        return scalar_of(value.item()) if value.dtype.kind in "OSU" or is_number(value) else value
    if is_tensor(value) and not value.is_nested and value.ndim == 0:
        from rlskip.format.torch_maker import is_plain

        with contextlib.suppress(NotImplementedError):  # of less than a byte
            return value.item() if is_plain(value) else value
    return value


def is_number(array: np.ndarray | np.generic) -> bool:
    """Whether numpy's elements are numbers without padding, as a long double's are not."""
    kind, size = array.dtype.kind, array.dtype.itemsize
    return kind in "biu" or (kind == "f" and size <= 8) or (kind == "c" and size <= 16)


# -- hashing -------------------------------------------------------------------------------


class _Hasher:
    """The hash of a value. A prefix with kind and length keeps the parts apart.

    The hashed bytes of a value must not change, because dumps on disk carry fingerprints. `path`
    has the keys and numbers that lead to the part that is being hashed, each with what is there,
    also when that raises.
    """

    def __init__(self, walk: Walk, path: list[tuple[Any, Any]]) -> None:
        self._digest = xxhash.xxh3_128()
        self._walk = walk
        self._path = path

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def _put(self, sort: str, *data: Any) -> None:
        views = [memoryview(part).cast("B") for part in data if len(part)]
        self._digest.update(f"{sort}:{sum(map(len, views))};".encode())
        for view in views:
            self._digest.update(view)

    def feed(self, value: Any) -> None:
        if type(value) is np.ndarray and value.ndim and value.dtype != object:
            self._feed_array(value)  # at once: rows of tokens are many
            return
        if type(value) is not str:
            value = scalar_of(value)
        if isinstance(value, enum.Enum) and not isinstance(value, str | int | float):
            self._put(f"enum {type(value).__module__}.{type(value).__qualname__} {value.name}")
        elif isinstance(value, str):
            self._put("str", str.encode(value, "utf-8", "surrogatepass"))
        elif isinstance(value, bytes | bytearray):
            self._put("bytes", value)
        elif value is None or isinstance(value, bool):
            self._put(type(value).__name__, repr(value).encode())
        elif isinstance(value, int):
            self._put("int", repr(int(value)).encode())
        elif isinstance(value, float):
            self._put("float", repr(float(value) + 0).encode())  # + 0: no -0.0
        elif isinstance(value, complex):
            self._put("complex", repr(complex(value) + 0).encode())
        else:
            self._feed_composite(value)

    def _feed_composite(self, value: Any) -> None:
        if why := self._walk.why_endless(len(self._path)):
            raise UnsupportedTypeError(why)
        if is_tensor(value) and _is_of("torch", value):
            if value.is_nested:
                self._feed_sequence(value.unbind())
            else:
                self._feed_tensor(value)
        elif _is_mapping(value):
            columns = columns_of(value)
            self._put(f"mapping {len(columns)}")
            for key in sorted(columns, key=self._order):
                self._feed_part(key, key)
                self._feed_part(key, columns[key])
        elif _is_sequence(value):
            self._feed_sequence(_rows(value))
        elif isinstance(value, np.ndarray | np.generic) and _is_of("numpy", value):
            self._feed_array(np.asarray(value))
        elif is_wrapped(value):
            self.feed(value.data)
        elif isinstance(value, Set):
            self._put("set", "".join(sorted(map(self._hash_apart, value))).encode())
        elif isinstance(value, os.PathLike):
            self._put("path", os.fsencode(value))
        else:
            if isinstance(value, loaded("PIL.Image", "Image")):
                value = value.copy()  # its class says which kind of file it was read from
            packer = Packer()
            self._put(type(value).__qualname__, json.dumps(packer.node(value)).encode())
            for array in packer.arrays:
                self._put(array.spec, *(part.view(np.uint8) for part in array.parts))

    def _feed_part(self, place: Any, part: Any) -> None:
        self._path.append((place, part))
        self.feed(part)
        self._path.pop()

    def _hash_apart(self, part: Any) -> str:
        """The hash of a part on its own, to sort by: of a set's item, or of a mapping's key."""
        apart = _Hasher(self._walk, self._path)
        apart._feed_part(_APART, part)
        return apart.hexdigest()

    def _order(self, key: Any) -> tuple[str, str]:
        """The sort key for keys of mappings: the same in every process, for keys of any type."""
        key = scalar_of(key)
        if isinstance(key, str):
            return "str", str.__str__(key)
        if key is None or isinstance(key, bool | int | float):
            return type(key).__name__, repr(key)
        return type(key).__name__, self._hash_apart(key)

    def _feed_sequence(self, parts: Sequence[Any]) -> None:
        # Rows of tokens, jagged or a list of arrays.
        sort = "nested" if parts and all(map(_is_row, parts)) else "sequence"
        self._put(f"{sort} {len(parts)}")
        for i, part in enumerate(parts):
            self._feed_part(i, part)

    def _feed_tensor(self, value: Any) -> None:
        from rlskip.format.torch_maker import flat_bytes, is_plain

        if not is_plain(value):
            raise UnsupportedTypeError(f"cannot compare a tensor of {value.layout}, {value.device}")
        name = str(value.dtype).removeprefix("torch.")
        self._put(f"array {name} {[*value.shape]}", equal_bits(flat_bytes(value), name))

    def _feed_array(self, value: np.ndarray) -> None:
        kind = value.dtype.kind
        if kind == "O":
            self._put(f"objects {[*value.shape]}")  # empty, with that shape
            return
        if kind not in "SUmM" and not is_number(value):
            raise UnsupportedTypeError(f"cannot compare an array of dtype {value.dtype}")
        if kind in "SU":  # as wide as its longest, and of one character at least
            longest = int(np.char.str_len(value).max()) if value.size else 0
            value = value.astype(f"{kind}{max(longest, 1)}")
        if not value.dtype.isnative:
            value = value.astype(value.dtype.newbyteorder("="))
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        name = value.dtype.name if kind in "biufc" else value.dtype.str
        self._put(f"array {name} {[*value.shape]}", equal_bits(data, name))


def equal_bits(data: np.ndarray, dtype: str) -> np.ndarray:
    """Bytes of floats with one zero and one NaN; the bytes of other types are unchanged."""
    infinity = _INFINITY.get(_PARTS.get(dtype, dtype))
    if infinity is None:
        return data
    width = 2 if infinity < 1 << 16 else 4 if infinity < 1 << 32 else 8
    bits = data.view(f"u{width}")
    sign = bits.dtype.type(1 << (8 * width - 1))
    magnitude = bits & ~sign
    is_nan, is_zero = magnitude > infinity, magnitude == 0
    if not (is_nan.any() or (is_zero & (bits == sign)).any()):
        return data
    nan = bits.dtype.type(infinity | infinity >> 1)
    return np.where(is_nan, nan, np.where(is_zero, magnitude, bits)).view(np.uint8)
