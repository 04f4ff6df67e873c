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
"""In a path, what has no key: an item of a set."""
_NAMED = frozenset((str, int, bool, type(None)))
"""Types of which ``ascii`` gives the canonical text, also within a list."""


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
    try:
        text = _Canonical(path).text(without_volatile(frozenset(volatile), prompts))
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
    return xxhash.xxh3_128_hexdigest(text.encode())


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


class _Canonical:
    """A value as text: equal values, and no others, have equal texts. Arrays are in it by hash.

    The text of a value must not change, because dumps on disk carry fingerprints. `path` has the
    keys and numbers that lead to the part at hand, each with what is there, also when that raises.
    """

    def __init__(self, path: list[tuple[Any, Any]]) -> None:
        self._walk = Walk()
        self._path = path

    def text(self, value: Any) -> str:
        kind = type(value)
        if kind in _NAMED:
            return ascii(value)
        if kind is np.ndarray and value.ndim and value.dtype != object:
            return _array(value)  # at once: rows of tokens are many
        if kind in (list, tuple) and _NAMED.issuperset(map(type, value)):
            return ascii([*value])
        value = scalar_of(value)
        if isinstance(value, enum.Enum) and not isinstance(value, str | int | float):
            return f"enum {type(value).__module__}.{type(value).__qualname__} {value.name}"
        if isinstance(value, str):
            return ascii(str.__str__(value))
        if value is None or isinstance(value, bool):
            return repr(value)
        if isinstance(value, int):
            return repr(int(value))
        if isinstance(value, float):
            return repr(float(value) + 0)  # + 0: no -0.0
        if isinstance(value, complex):
            return repr(complex(value) + 0)
        if isinstance(value, bytes | bytearray):
            return f"bytes {xxhash.xxh3_128_hexdigest(value)}"
        return self._composite(value)

    def _composite(self, value: Any) -> str:
        if why := self._walk.why_endless(len(self._path)):
            raise UnsupportedTypeError(why)
        if is_tensor(value) and _is_of("torch", value):
            return self._sequence(value.unbind()) if value.is_nested else _tensor(value)
        if _is_mapping(value):
            entries = [(self._part(k, k), self._part(k, v)) for k, v in columns_of(value).items()]
            return f"{{{', '.join(f'{key}: {part}' for key, part in sorted(entries))}}}"
        if _is_sequence(value):
            return self._sequence(_rows(value))
        if isinstance(value, np.ndarray | np.generic) and _is_of("numpy", value):
            return _array(np.asarray(value))
        if is_wrapped(value):
            return self.text(value.data)
        if isinstance(value, Set):
            return f"set {sorted(self._part(_APART, item) for item in value)}"
        if isinstance(value, os.PathLike):
            return f"path {os.fsencode(value)!r}"
        if isinstance(value, loaded("PIL.Image", "Image")):
            value = value.copy()  # its class says which kind of file it was read from
        packer = Packer()
        node = json.dumps(packer.node(value))
        arrays = [_hash_of(array.spec, *array.parts) for array in packer.arrays]
        return f"{type(value).__qualname__} {node} {arrays}"

    def _part(self, place: Any, part: Any) -> str:
        self._path.append((place, part))
        text = self.text(part)
        self._path.pop()
        return text

    def _sequence(self, parts: Sequence[Any]) -> str:
        return f"[{', '.join(self._part(i, part) for i, part in enumerate(parts))}]"


def _hash_of(kind: str, *parts: Any) -> str:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part.view(np.uint8))
    return f"{kind} {digest.hexdigest()}"


def _tensor(value: Any) -> str:
    import torch

    from rlskip.format.torch_maker import flat_bytes, is_plain

    if not is_plain(value):
        raise UnsupportedTypeError(f"cannot compare a tensor of {value.layout}, {value.device}")
    kind = f"{str(value.dtype).removeprefix('torch.')} {[*value.shape]}"
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    if not value.is_floating_point() or value.element_size() == 1:
        return _hash_of(kind, flat_bytes(value))
    wide = value if value.dtype is torch.float64 else value.float()  # numpy lacks some types
    return _hash_of(kind, _equal_floats(flat_bytes(wide).view(f"f{wide.element_size()}")))


def _array(value: np.ndarray) -> str:
    kind = value.dtype.kind
    if kind == "O":
        return f"objects {[*value.shape]}"  # empty, with that shape
    if kind not in "SUmM" and not is_number(value):
        raise UnsupportedTypeError(f"cannot compare an array of dtype {value.dtype}")
    if kind in "SU":  # as wide as its longest, and of one character at least
        longest = int(np.char.str_len(value).max()) if value.size else 0
        value = value.astype(f"{kind}{max(longest, 1)}")
    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    flat = np.ascontiguousarray(value).reshape(-1)
    name = value.dtype.name if kind in "biufc" else value.dtype.str
    return _hash_of(f"{name} {[*value.shape]}", _equal_floats(flat) if kind in "fc" else flat)


def _equal_floats(flat: np.ndarray) -> np.ndarray:
    """What these floats are, or are made of, in 32 or 64 bits with one zero and one NaN."""
    parts = flat.view(f"f{flat.itemsize // 2}") if flat.dtype.kind == "c" else flat
    wide = parts.astype(np.float64 if parts.itemsize == 8 else np.float32) + 0
    return np.where(np.isnan(wide), wide.dtype.type(np.nan), wide)
