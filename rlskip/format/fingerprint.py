"""The one rule by which two values are equal: their plain JSON is. A fingerprint is its hash.

docs/skip.md states the rule. Of prompts ``1`` and ``1.0`` are two values, anywhere else one.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import json
import math
import numbers
import os
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import xxhash

from rlskip.batch.columns import columns_of, is_data_proto, is_lazy, is_tensor, unwrapped
from rlskip.batch.tables import loaded
from rlskip.format.codec import place_at
from rlskip.format.dump_errors import UnsupportedTypeError, text_of
from rlskip.format.kinds import Packer

VOLATILE = frozenset(
    ("uid", "uids", "request_id", "request_ids", "sample_id", "global_step", "global_steps",
     "meta_info", "timing", "timestamp", "timestamps", "created", "created_at", "updated_at")
)  # fmt: skip
"""Fields of a batch, and of its ``extra_info``, that record when it was made, not what it holds."""
NOTES = "extra_info"

_REMEDY = (
    "give numbers, strings, arrays, or lists and mappings of these; leave it out of the "
    "comparison: annotate(prompts=...) names the argument that holds the prompts, or computes "
    "them; or register a codec for its type: rlskip.store.register_codec(type, name, encode, "
    "decode)"
)
_encoded = json.JSONEncoder(sort_keys=True).encode
_digest: Callable[[Any], str] = xxhash.xxh3_128_hexdigest
# Of numbers that every numpy has, in this machine's byte order; each with its name, which numpy
# computes at every access.
_PLAIN = {np.dtype(n): n for n in ("bool", "uint8", "int32", "int64", "float32", "float64")}
_AS_TEXT = (
    numbers.Number, range, slice, re.Pattern, uuid.UUID, datetime.date, datetime.time,
    datetime.timedelta, type(...),
)  # fmt: skip


class Marked(str):
    """A text in angle brackets that stands for a value which JSON lacks, such as ``<bytes ...>``.

    A text of the user's that looks like one is marked itself, so that the two are never equal.
    """


_OF_JSON = frozenset((str, int, bool, type(None), Marked))


def fingerprint(prompts: Any, volatile: Iterable[str] | None = VOLATILE) -> str:
    """Content hash of prompts of any kind that dumps can store, 32 hexadecimal digits.

    Two values have one fingerprint if their values, dtypes and shapes are equal. These do not
    count: the order of a mapping's keys, devices, strides, byte order, the width of text in arrays,
    what an image notes besides its pixels, and the `volatile` fields of the outermost mapping, or
    of its rows if the outermost is a sequence of mappings (None: the value is without them).

    A tensor is equal to a numpy array; a scalar of Python to one of numpy and to a 0-d tensor of
    that value, whatever its width; lists, tuples and 1-D object arrays to each other; a jagged
    tensor to the list of its rows; a path to its text; a DataProto and a TensorDict, lazy or not,
    to the mapping of their columns. int32 prompts are not int64 prompts, nor is 1 equal to 1.0.
    NaN is equal to itself, and 0.0 to -0.0.

    Raises UnsupportedTypeError for a part that cannot be compared, and names its place.
    """
    left_out = None if volatile is None else frozenset(volatile)
    return _digest(_encoded(plain_json(prompts, "prompts", volatile=left_out)).encode())


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


def plain_json(
    value: Any,
    where: str,
    simplify: Callable[[Any], Any] | None = None,
    volatile: frozenset[str] | None = None,
) -> Any:
    """`value` as plain JSON that differs for any two values that are not equal.

    Raises UnsupportedTypeError for a part that cannot be compared; `where` is the name of the
    value. `simplify` is called with each part before it is converted: it returns a simpler value,
    or raises what ends the conversion. A batch is without its `volatile` fields.
    """
    conversion = _Conversion(simplify)
    try:
        return conversion.plain(value if volatile is None else without_volatile(volatile, value))
    except MemoryError:
        raise
    except Exception as error:
        if simplify is not None:  # who gives one tells its own errors
            raise
        path = conversion.path
        where += place_at(place for place, _ in path)
        kind = type(path[-1][1] if path else value)
        what = f"cannot compare a {kind.__module__}.{kind.__qualname__}: {text_of(error)}"
        if isinstance(error, UnsupportedTypeError):
            what, where = error.what, f"{where}{error.where}"
        where = where if len(where) <= 200 else f"{where[:200]}..."
        raise UnsupportedTypeError(what, where, _REMEDY) from error


def canonical(value: Any) -> str:
    """The text of plain JSON: the same for values that are equal, and for no others."""
    return _encoded(_by_value(value))


def _by_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _by_value(part) for key, part in value.items()}
    if isinstance(value, list):
        return [*map(_by_value, value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_text(cls: type) -> bool:
    """Whether an object of a class has all that it is in its ``repr``."""
    return issubclass(cls, _AS_TEXT) or cls.__name__.lower().endswith("dtype")


def is_number(array: np.ndarray | np.generic) -> bool:
    """Whether numpy's elements are numbers without padding, as a long double's are not."""
    kind, size = array.dtype.kind, array.dtype.itemsize
    return kind in "biu" or (kind == "f" and size <= 8) or (kind == "c" and size <= 16)


def _is_mapping(value: Any) -> bool:
    if type(value) is dict or not is_lazy(value):
        return isinstance(value, Mapping)
    # Of a stack of TensorDicts, tensordict shows only the keys that all parts have.
    is_stack = not isinstance(value, loaded("tensordict", "NonTensorStack"))
    return is_stack and len({frozenset(it.keys(True, True)) for it in value.tensordicts}) == 1


def _is_sequence(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype == object and value.ndim > 0 and (value.size > 0 or value.ndim == 1)
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
    return is_list or is_lazy(value)


def _rows(value: Any) -> Sequence[Any]:
    return value.tensordicts if is_lazy(value) else [*value]


def _is_of(package: str, value: Any) -> bool:
    """Whether the class of `value` is the package's; a subclass elsewhere may add content."""
    is_masked = isinstance(value, np.ma.MaskedArray)
    return type(value).__module__.split(".")[0] in (package, "tensordict") and not is_masked


def _scalar_of(value: Any) -> Any:
    """A scalar of numpy, a 0-d array or a 0-d tensor as Python's scalar of its value."""
    if isinstance(value, np.ndarray | np.generic) and value.ndim == 0 and _is_of("numpy", value):
        return _scalar_of(value.item()) if value.dtype.kind in "OSU" or is_number(value) else value
    if is_tensor(value) and not value.is_nested and value.ndim == 0:
        with contextlib.suppress(RuntimeError):  # of less than a byte, or without elements
            return value.item()
    return value


class _Conversion(Packer):
    """The walk over a value. Arrays, and what else JSON lacks, are in its result by hash.

    The result for a value must not change, because dumps on disk carry it. `path` has the places
    that lead to the part at hand, each with what is there, also when that raises. What only the
    codec knows it takes apart, and its parts are compared as all others.
    """

    def __init__(self, simplify: Callable[[Any], Any] | None) -> None:
        super().__init__()
        self.path: list[tuple[str | tuple[Any], Any]] = []
        self._simplify = simplify

    def plain(self, value: Any) -> Any:
        kind = type(value)
        if kind in _OF_JSON:
            return _text(value) if kind is str and value[:1] == "<" else value
        if kind is float:
            return value + 0  # + 0: no -0.0
        if self._simplify is not None:
            value = self._simplify(value)
            kind = type(value)
        # At once: a prompt has several of these, or is one, and a step many prompts.
        if kind in (list, tuple) and _OF_JSON.issuperset(map(type, value)):
            return [_text(part) if type(part) is str else part for part in value]
        if kind is np.ndarray and value.ndim and value.dtype in _PLAIN:
            return _array(value)
        if kind is dict:
            if _OF_JSON.issuperset(map(type, value.values())) and {*map(type, value)} == {str}:
                parts = [*map(_text, value)], self.plain([*value.values()])
                return dict(sorted(zip(*parts, strict=True)))
            return self._composite(value)
        value = _scalar_of(unwrapped(value))
        kind = type(value)
        if issubclass(kind, enum.Enum):
            # A member's name outlives its value.
            kept = value._value_
            parts = kept if isinstance(kept, tuple) else (kept,)
            kept = kept if all(isinstance(part, bool | int | float | str) for part in parts) else ""
            return f"<{kind.__qualname__}.{value._name_} {kept!r}>"
        if isinstance(value, str | os.PathLike):
            return _text(os.fspath(value))
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):  # a subclass of the user's may add otherwise
            return int(value)
        if isinstance(value, float):
            return float(value) + 0
        if issubclass(kind, re.Pattern):  # its own repr shows 200 characters
            return f"<pattern {value.pattern!r} {value.flags}>"
        if is_text(kind) and not isinstance(value, np.generic):
            return f"<{value!r}>"
        if isinstance(value, bytes | bytearray):
            return f"<bytes {_digest(value)}>"
        return self._composite(value)

    def _composite(self, value: Any) -> Any:
        if why := self.why_endless(len(self.path)):
            raise UnsupportedTypeError(why)
        if is_tensor(value) and _is_of("torch", value):
            return self._sequence(value.unbind()) if value.is_nested else _tensor(value)
        if _is_mapping(value):
            parts = columns_of(value).items()
            return dict(sorted((self._key(key), self.node(part, (key,))) for key, part in parts))
        if _is_sequence(value):
            return self._sequence(_rows(value))
        if isinstance(value, np.ndarray | np.generic) and _is_of("numpy", value):
            return _array(np.asarray(value))
        if isinstance(value, Set):
            return {"<set>": sorted((self.node(item) for item in value), key=canonical)}
        if isinstance(value, loaded("PIL.Image", "Image")):
            value = value.copy()  # its class says which kind of file it was read from
        return {f"<{type(value).__qualname__}>": super().node(value)}

    def _key(self, key: Any) -> str:
        """A mapping's key as a text; the keys 1 and "1" stay two."""
        plain = _text(key) if type(key) is str else self.node(key, (key,))
        return plain if isinstance(plain, str) else f"<key {canonical(plain)}>"

    def node(self, value: Any, at: str | tuple[Any] = "") -> Any:
        self.path.append((at, value))
        plain = self.plain(value)
        self.path.pop()
        return plain

    def array(self, data: np.ndarray, spec: str, owned: bool = True) -> Any:
        return _digest(data)

    def _sequence(self, parts: Sequence[Any]) -> list[Any]:
        return [self.node(part, (i,)) for i, part in enumerate(parts)]


def _text(value: str) -> str:
    text = str.__str__(value)
    is_marked = text[:1] == "<" and text.endswith(">") and not isinstance(value, Marked)
    return f"<str {text}>" if is_marked else text


def _tensor(value: Any) -> str:
    import torch

    from rlskip.format.torch_maker import flat_bytes, is_plain

    if not is_plain(value):
        raise UnsupportedTypeError(f"cannot compare a tensor of {value.layout}, {value.device}")
    kind = f"{str(value.dtype).removeprefix('torch.')} {[*value.shape]}"
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    if value.is_floating_point() and value.element_size() > 1:
        wide = value if value.dtype is torch.float64 else value.float()  # numpy lacks some types
        flat = _equal_floats(flat_bytes(wide).view(f"f{wide.element_size()}"))
    else:
        flat = flat_bytes(value)
    return f"<{kind} {_digest(flat)}>"


def _array(value: np.ndarray) -> str:
    kind = value.dtype.kind
    if (name := _PLAIN.get(value.dtype)) is None:
        if kind == "O":
            return f"<objects {[*value.shape]}>"  # empty, with that shape
        if kind not in "SUmM" and not is_number(value):
            raise UnsupportedTypeError(f"cannot compare an array of dtype {value.dtype}")
        if kind in "SU":  # as wide as its longest, and of one character at least
            longest = int(np.char.str_len(value).max()) if value.size else 0
            value = value.astype(f"{kind}{max(longest, 1)}")
        value = value.astype(value.dtype.newbyteorder("="), copy=False)
        name = value.dtype.name if kind in "biufc" else value.dtype.str
    flat = np.ascontiguousarray(value).reshape(-1)
    # Of times numpy has no buffer, but of bytes.
    digest = _digest(_equal_floats(flat) if kind in "fc" else flat.view(np.uint8))
    return f"<{name} {[*value.shape]} {digest}>"


def row_texts(column: np.ndarray, real: np.ndarray | None) -> list[Marked] | None:
    """What :func:`plain_json` makes of each row of an array, of the elements that are `real`.

    All at once: a small array takes far longer than its bytes. None where rows are to be looked at
    one by one. `real` is of the first and the last dimension; None: all are.
    """
    name, (n, *inner, width) = _PLAIN.get(column.dtype), column.shape
    if name is None or type(column) is not np.ndarray:
        return None
    widths = [width] * n
    if real is not None:
        widths = np.count_nonzero(real, axis=1).tolist()
        column = column[np.broadcast_to(real.reshape(n, *[1] * len(inner), width), column.shape)]
    flat = np.ascontiguousarray(column).reshape(-1)
    raw = (_equal_floats(flat) if column.dtype.kind == "f" else flat).view(np.uint8)
    ends = accumulate((math.prod(inner) * w * flat.itemsize for w in widths), initial=0)
    return [
        Marked(f"<{name} {[*inner, w]} {_digest(raw[start:end])}>")
        for w, (start, end) in zip(widths, pairwise(ends), strict=True)
    ]


def _equal_floats(flat: np.ndarray) -> np.ndarray:
    """What these floats are, or are made of, in 32 or 64 bits with one zero and one NaN."""
    parts = flat.view(f"f{flat.itemsize // 2}") if flat.dtype.kind == "c" else flat
    wide = parts.astype(np.float64 if parts.itemsize == 8 else np.float32) + 0
    return np.where(np.isnan(wide), wide.dtype.type(np.nan), wide)
