"""The kinds of Python and of numpy: numbers, text, containers, arrays.

Long lists of numbers or texts, and lists of such lists (token ids), are packed into arrays.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np

from rlskip.batch.columns import objects_of
from rlskip.format.codec import Kind, Node, Packer, Unpacker

_OBJECTS = 8  # bytes of objects of Python, about, for each byte of an array that holds them


def _pack_list(values: Sequence[Any], packer: Packer) -> list[Node]:
    kinds = {*map(type, values)}
    if len(values) >= 8:
        if kinds == {str}:
            encoded = [value.encode("utf-8", "surrogatepass") for value in values]
            text = np.frombuffer(b"".join(encoded), np.uint8)
            return ["str", _pack_lengths(encoded, packer), packer.array(text, "x1")]
        if kinds == {float}:
            return ["float", packer.array(np.array(values, np.float64), "x8")]
        if kinds == {int} and min(values) >= -(2**63) and max(values) < 2**63:
            return ["int", packer.array(np.array(values, np.int64), "i8")]
    if kinds == {list} and len(values) > 1:
        flat = [*chain.from_iterable(values)]
        if len(flat) >= 8 and {*map(type, flat)} in ({int}, {float}, {str}):
            return ["runs", _pack_lengths(values, packer), packer.node(flat)]
    return ["any", [packer.node(value, (i,)) for i, value in enumerate(values)]]


def _pack_lengths(runs: Sequence[Any], packer: Packer) -> int:
    return packer.array(np.fromiter(map(len, runs), np.int64, len(runs)), "i8")


def _pack_set(values: Iterable[Any], packer: Packer) -> list[Node]:
    # The order of strings in a set differs from process to process.
    return _pack_list(sorted(values, key=lambda item: (type(item).__name__, repr(item))), packer)


def _unpack_list(unpacker: Unpacker, form: str, content: Node, flat: Node = None) -> list[Any]:
    if form == "any":
        return [*map(unpacker.node, content)]
    numbers = unpacker.source.array(content).view("f8" if form == "float" else "i8")
    unpacker.charge(_OBJECTS * numbers.nbytes)
    if form == "str":
        text = unpacker.source.array(flat).tobytes()
        unpacker.charge(4 * len(text))  # each character of a string with a wide one takes as much
        return [run.decode("utf-8", "surrogatepass") for run in _cut(text, numbers)]
    return _cut(unpacker.list_of(flat), numbers) if form == "runs" else numbers.tolist()


def _cut(flat: Any, lengths: np.ndarray) -> list[Any]:
    """`flat` cut into runs of these lengths."""
    if (lengths < 0).any():  # many runs could each be all of it
        raise ValueError("a run of impossible length")
    ends = [0, *np.cumsum(lengths).tolist()]
    return [flat[start:end] for start, end in pairwise(ends)]


def _collection(kind: type) -> Kind:
    pack = _pack_set if kind in (set, frozenset) else _pack_list
    return Kind(
        kind.__name__, kind, pack, lambda unpacker, *parts: kind(_unpack_list(unpacker, *parts))
    )


def _mapping(kind: type) -> Kind:
    return Kind(
        kind.__name__.lower(),
        kind,
        lambda value, packer: [packer.entries(value.items())],
        lambda unpacker, entries: kind(unpacker.entries(entries)),
    )


_FACTORIES: dict[str | None, Any] = {
    None: None, **{f.__name__: f for f in (list, dict, set, int, float, str, bool, tuple)},
}  # fmt: skip


def _pack_defaultdict(value: defaultdict, packer: Packer) -> list[Node]:
    factory = value.default_factory
    if factory not in _FACTORIES.values():
        raise packer.unsupported(value, f"its default factory {factory!r} is not a builtin type")
    return [getattr(factory, "__name__", None), packer.entries(value.items())]


def _unpack_defaultdict(unpacker: Unpacker, name: str | None, entries: Node) -> defaultdict:
    return defaultdict(_FACTORIES[name], unpacker.entries(entries))


def _raw(kind: type) -> Kind:
    return Kind(
        kind.__name__,
        kind,
        lambda value, packer: [packer.array(np.frombuffer(bytes(value), np.uint8), "x1")],
        lambda unpacker, number: kind(unpacker.source.array(number)),
    )


def _dtype(name: str) -> np.dtype:
    dtype = np.dtype(name)
    if dtype.kind not in "biufcSUmM":
        raise ValueError(f"an array of {name}")
    return dtype


def _elements(array: np.ndarray) -> tuple[np.ndarray, str, bool]:
    """A contiguous 1-D view, or a copy, in a type that the file stores; and whether it is one."""
    flat, kind = np.ascontiguousarray(array).reshape(-1), array.dtype.kind
    owned = not np.may_share_memory(flat, array)
    if kind in "iu" and array.dtype.isnative:
        return flat, f"{kind}{flat.itemsize}", owned
    if kind == "b":
        return flat.view(np.uint8), "u1", owned
    width = math.gcd(array.dtype.itemsize // 2 if kind == "c" else array.dtype.itemsize, 8)
    return flat.view(f"u{width}"), f"x{width}", owned


def _pack_ndarray(value: np.ndarray, packer: Packer) -> list[Node]:
    if value.dtype == object:
        return ["O", [*value.shape], packer.node([*value.reshape(-1)])]
    if value.dtype.kind not in "biufcSUmM" or not value.dtype.itemsize:
        raise packer.unsupported(value, f"its dtype {value.dtype} has no codec")
    return [value.dtype.str, [*value.shape], packer.once(value, _elements)]


def _unpack_ndarray(unpacker: Unpacker, name: str, shape: list[int], content: Node) -> np.ndarray:
    if name == "O":
        return objects_of(unpacker.list_of(content)).reshape(shape)
    dtype = _dtype(name)
    if content is None:
        return np.empty(0, dtype).reshape(shape)
    return unpacker.once(content, lambda raw: raw.view(dtype).reshape(shape))  # type: ignore[no-any-return]


def _pack_scalar(value: np.generic, packer: Packer) -> list[Node]:
    if isinstance(value, np.str_):
        return ["U", packer.node(str(value))]
    if value.dtype.kind not in "biufcmM":
        raise packer.unsupported(value, f"its dtype {value.dtype} has no codec")
    return [value.dtype.str, value.tobytes().hex()]


def _unpack_scalar(unpacker: Unpacker, name: str, content: Node) -> Any:
    if name == "U":
        return np.str_(unpacker.node(content))
    (value,) = np.frombuffer(bytes.fromhex(content), _dtype(name))
    return value


KINDS = [
    *map(_collection, (list, tuple, set, frozenset)),
    *map(_mapping, (dict, OrderedDict)),
    Kind("defaultdict", defaultdict, _pack_defaultdict, _unpack_defaultdict),
    *map(_raw, (bytes, bytearray)),
    # Integers beyond 64 bits, floats that JSON cannot write, strings that it would change.
    Kind("int", int, lambda value, _: [hex(value)], lambda _, text: int(text, 16)),
    Kind(
        "float",
        float,
        lambda value, _: [struct.pack(">d", value).hex()],
        lambda _, bits: struct.unpack(">d", bytes.fromhex(bits))[0],
    ),
    Kind(
        "str",
        str,
        lambda value, _: [value.encode("utf-8", "surrogatepass").hex()],
        lambda _, text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    ),
    Kind("ndarray", np.ndarray, _pack_ndarray, _unpack_ndarray),
    Kind("scalar", lambda kind: issubclass(kind, np.generic), _pack_scalar, _unpack_scalar),
]
