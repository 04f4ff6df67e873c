"""The kinds of Python: numbers, text, containers.

Long lists of one type of number, or of text, are packed into arrays, and so are lists of such
lists (token ids per row).
"""

from __future__ import annotations

import struct
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np

from rlskip.format.codec import (
    Kind,
    Node,
    Pack,
    Packer,
    Unpack,
    Unpacker,
    pack_entries,
)


def _pack_list(values: Sequence[Any], packer: Packer) -> list[Node]:
    kinds = set(map(type, values))
    if len(values) >= 8:
        if kinds == {str}:
            return ["str", *_pack_strings(values, packer)]
        if kinds == {float}:
            return ["float", packer.array(np.array(values, np.float64), "x8")]
        if kinds == {int} and min(values) >= -(2**63) and max(values) < 2**63:
            return ["int", packer.array(np.array(values, np.int64), "i8")]
    if kinds == {list} and len(values) > 1:
        flat = list(chain.from_iterable(values))
        if len(flat) >= 8 and set(map(type, flat)) in ({int}, {float}, {str}):
            counts = np.fromiter(map(len, values), np.int64, len(values))
            return ["runs", packer.array(counts, "i8"), packer.node(flat)]
    return ["any", [packer.node(value, (i,)) for i, value in enumerate(values)]]


def _unpack_list(parts: list[Node], unpacker: Unpacker) -> list[Any]:
    form, *rest = parts
    if form == "any":
        (nodes,) = rest
        return [unpacker.node(node) for node in nodes]
    if form == "str":
        return _unpack_strings(rest, unpacker)
    if form in ("float", "int"):
        return list(unpacker.objects(rest[0], "f8" if form == "float" else "i8").tolist())
    counts = unpacker.objects(rest[0], "i8")  # "runs"
    return _cut(unpacker.list_of(rest[1]), counts)


def _cut(flat: Any, counts: np.ndarray) -> list[Any]:
    """`flat` cut into runs of these lengths."""
    ends = np.concatenate([[0], np.cumsum(counts)])
    if (ends[1:] < ends[:-1]).any():  # many runs could each be all of it
        raise ValueError("a run of impossible length")
    return [flat[a:b] for a, b in pairwise(ends.tolist())]


def _pack_strings(values: Sequence[str], packer: Packer) -> list[Node]:
    encoded = [value.encode("utf-8", "surrogatepass") for value in values]
    counts = np.fromiter(map(len, encoded), np.int64, len(encoded))
    text = np.frombuffer(b"".join(encoded), np.uint8)
    return [packer.array(counts, "i8"), packer.array(text, "x1")]


def _unpack_strings(parts: list[Node], unpacker: Unpacker) -> list[str]:
    counts = unpacker.objects(parts[0], "i8")
    text = unpacker.array(parts[1], "u1").tobytes()
    unpacker.charge(4 * len(text))  # each character of a string with a wide one takes as much
    return [run.decode("utf-8", "surrogatepass") for run in _cut(text, counts)]


def _pack_set(value: set | frozenset, packer: Packer) -> list[Node]:
    # The order of strings in a set differs from process to process.
    values = sorted(value, key=lambda item: (type(item).__name__, repr(item)))
    return _pack_list(values, packer)


def _unpack_set(parts: list[Node], unpacker: Unpacker) -> list[Any]:
    return unpacker.hashable(_unpack_list(parts, unpacker))


_FACTORIES: dict[str, Any] = {
    f.__name__: f for f in (list, dict, set, int, float, str, bool, tuple)
}


def _pack_defaultdict(value: defaultdict, packer: Packer) -> list[Node]:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and _FACTORIES.get(name) is not factory:
        raise packer.unsupported(value, f"its default factory {factory!r} is not a builtin type")
    return [name, pack_entries(value.items(), packer)]


def _unpack_defaultdict(parts: list[Node], unpacker: Unpacker) -> defaultdict:
    factory = None if parts[0] is None else _FACTORIES[parts[0]]
    return defaultdict(factory, unpacker.entries(parts[1]))


def _pack_bytes(value: bytes | bytearray, packer: Packer) -> list[Node]:
    return [packer.array(np.frombuffer(bytes(value), np.uint8), "x1")]


def _float_bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def _bits_float(bits: str) -> float:
    return struct.unpack(">d", bytes.fromhex(bits))[0]  # type: ignore[no-any-return]


def _collection(kind: Any) -> Unpack:
    return lambda parts, unpacker: kind(_unpack_list(parts, unpacker))


def _unique(kind: Any) -> Unpack:
    return lambda parts, unpacker: kind(_unpack_set(parts, unpacker))


def _mapping(kind: Any) -> Unpack:
    return lambda parts, unpacker: kind(unpacker.entries(parts[0]))


def _raw(kind: Any) -> Unpack:
    return lambda parts, unpacker: kind(unpacker.array(parts[0], "u1"))


def _pack_mapping(value: Mapping[Any, Any], packer: Packer) -> list[Node]:
    return [pack_entries(value.items(), packer)]


def _of_python(kind: type, pack: Pack, unpack: Unpack) -> Kind:
    return Kind(kind.__name__.lower(), kind, pack, unpack)


KINDS = [
    _of_python(list, _pack_list, _collection(list)),
    _of_python(tuple, _pack_list, _collection(tuple)),
    _of_python(set, _pack_set, _unique(set)),
    _of_python(frozenset, _pack_set, _unique(frozenset)),
    _of_python(dict, _pack_mapping, _mapping(dict)),
    _of_python(OrderedDict, _pack_mapping, _mapping(OrderedDict)),
    _of_python(defaultdict, _pack_defaultdict, _unpack_defaultdict),
    _of_python(bytes, _pack_bytes, _raw(bytes)),
    _of_python(bytearray, _pack_bytes, _raw(bytearray)),
    # Integers beyond 64 bits, floats that JSON cannot write, strings that it would change.
    _of_python(int, lambda v, _: [hex(v)], lambda parts, _: int(parts[0], 16)),
    _of_python(float, lambda v, _: [_float_bits(v)], lambda parts, _: _bits_float(parts[0])),
    _of_python(
        complex,
        lambda v, _: [_float_bits(v.real), _float_bits(v.imag)],
        lambda parts, _: complex(_bits_float(parts[0]), _bits_float(parts[1])),
    ),
    _of_python(
        str,
        lambda v, _: [v.encode("utf-8", "surrogatepass").hex()],
        lambda parts, _: bytes.fromhex(parts[0]).decode("utf-8", "surrogatepass"),
    ),
]
