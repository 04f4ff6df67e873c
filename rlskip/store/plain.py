"""The kinds of Python: numbers, text, containers, named tuples.

Long lists of one sort of number or text are packed into arrays, and so are lists of such lists
(token ids per row).
"""

from __future__ import annotations

import struct
import sys
import types
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from rlskip.store.codec import Kind, Node, Packer, Unpacker, add_kind


def _pack_list(values: Sequence[Any], packer: Packer) -> list[Node]:
    kinds = set(map(type, values))
    if len(values) >= 8:
        if kinds == {str}:
            return ["str", *_pack_strings(values, packer)]
        if kinds == {float}:
            return ["float", packer.array(np.array(values, np.float64), "x")]
        if kinds == {int} and min(values) >= -(2**63) and max(values) < 2**63:
            return ["int", packer.array(np.array(values, np.int64), "i")]
    if kinds == {list} and len(values) > 1:
        flat = list(chain.from_iterable(values))
        if len(flat) >= 8 and set(map(type, flat)) in ({int}, {float}, {str}):
            counts = np.fromiter(map(len, values), np.int64, len(values))
            return ["runs", packer.array(counts, "i"), packer.node(flat)]
    return ["any", [packer.node(value, (i,)) for i, value in enumerate(values)]]


def _unpack_list(parts: list[Node], unpacker: Unpacker) -> list[Any]:
    form, *rest = parts
    if form == "any":
        return [unpacker.node(node) for node in rest[0]]
    if form == "str":
        return _unpack_strings(rest, unpacker)
    if form == "float":
        return list(unpacker.array(rest[0], "f8").tolist())
    if form == "int":
        return list(unpacker.array(rest[0], "i8").tolist())
    if form == "runs":
        ends = _ends(unpacker.array(rest[0], "i8"))
        flat = unpacker.node(rest[1])
        if type(flat) is not list or (ends[-1] if ends else 0) != len(flat):
            raise ValueError("runs do not add up")
        return [flat[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    raise ValueError(form)


def _ends(counts: np.ndarray) -> list[int]:
    if len(counts) and (counts.min() < 0 or counts.max() > 2**40):
        raise ValueError("a run of impossible length")
    return [int(end) for end in np.cumsum(counts)]


def _pack_strings(values: Sequence[str], packer: Packer) -> list[Node]:
    encoded = [value.encode("utf-8", "surrogatepass") for value in values]
    counts = np.fromiter(map(len, encoded), np.int64, len(encoded))
    return [packer.array(counts, "i"), packer.array(np.frombuffer(b"".join(encoded), "u1"), "x")]


def _unpack_strings(parts: list[Node], unpacker: Unpacker) -> list[str]:
    ends = _ends(unpacker.array(parts[0], "i8"))
    text = unpacker.array(parts[1], "u1").tobytes()
    if (ends[-1] if ends else 0) != len(text):
        raise ValueError("strings do not add up")
    return [
        text[a:b].decode("utf-8", "surrogatepass") for a, b in zip([0, *ends], ends, strict=False)
    ]


def pack_entries(items: Iterable[tuple[Any, Any]], packer: Packer) -> list[list[Node]]:
    return [[packer.node(key, ".keys()"), packer.node(value, (key,))] for key, value in items]


_FACTORIES: dict[str, Any] = {
    f.__name__: f for f in (list, dict, set, int, float, str, bool, tuple)
}


def _pack_defaultdict(value: defaultdict, packer: Packer) -> list[Node]:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and _FACTORIES.get(name) is not factory:
        raise packer.unsupported(value, f"its default factory {factory!r} is no builtin type")
    return [name, pack_entries(value.items(), packer)]


def _unpack_defaultdict(parts: list[Node], unpacker: Unpacker) -> defaultdict:
    factory = None if parts[0] is None else _FACTORIES[parts[0]]
    return defaultdict(factory, unpacker.entries(parts[1]))


def _pack_bytes(value: bytes | bytearray, packer: Packer) -> list[Node]:
    return [packer.array(np.frombuffer(bytes(value), np.uint8), "x")]


def _is_namedtuple(value: Any) -> bool:
    fields = getattr(type(value), "_fields", None)
    return (
        isinstance(value, tuple)
        and type(value).__bases__ == (tuple,)
        and isinstance(fields, tuple)
        and len(fields) == len(value)
    )


def _pack_namedtuple(value: Any, packer: Packer) -> list[Node]:
    kind = type(value)
    values = [packer.node(v, f".{f}") for f, v in zip(kind._fields, value, strict=True)]
    return [kind.__module__, kind.__qualname__, list(kind._fields), values]


def _unpack_namedtuple(parts: list[Node], unpacker: Unpacker) -> Any:
    """The class itself where the program has imported it, else a twin of the same name.

    Looked up, never imported, and filled without calling anything of it.
    """
    module, qualname, fields, nodes = parts
    kind: Any = sys.modules.get(module)
    for name in qualname.split("."):
        kind = _members(kind).get(name)
    if _members(kind).get("_fields") != tuple(fields) or kind.__bases__ != (tuple,):
        kind = namedtuple(qualname.rsplit(".", 1)[-1], fields)  # type: ignore[misc,no-redef]
    if len(nodes) != len(fields):
        raise ValueError("a named tuple of another length")
    return tuple.__new__(kind, [unpacker.node(node) for node in nodes])


def _members(place: Any) -> Mapping[str, Any]:
    """The names in a module or class, past whatever either does when asked for an attribute."""
    if isinstance(place, type):
        return type.__getattribute__(place, "__dict__")  # type: ignore[no-any-return]
    if isinstance(place, types.ModuleType):
        return object.__getattribute__(place, "__dict__")  # type: ignore[no-any-return]
    return {}


def _float_bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def _bits_float(bits: str) -> float:
    return struct.unpack(">d", bytes.fromhex(bits))[0]  # type: ignore[no-any-return]


for _kind, _types in (
    (Kind("list", _pack_list, _unpack_list), [list]),
    (
        Kind("tuple", _pack_list, lambda parts, unpacker: tuple(_unpack_list(parts, unpacker))),
        [tuple],
    ),
    (
        Kind(
            "set",
            lambda value, packer: _pack_list(list(value), packer),
            lambda parts, unpacker: set(_unpack_list(parts, unpacker)),
        ),
        [set],
    ),
    (
        Kind(
            "frozenset",
            lambda value, packer: _pack_list(list(value), packer),
            lambda parts, unpacker: frozenset(_unpack_list(parts, unpacker)),
        ),
        [frozenset],
    ),
    (
        Kind(
            "dict",
            lambda value, packer: [pack_entries(value.items(), packer)],
            lambda parts, unpacker: dict(unpacker.entries(parts[0])),
        ),
        [dict],
    ),
    (
        Kind(
            "ordereddict",
            lambda value, packer: [pack_entries(value.items(), packer)],
            lambda parts, unpacker: OrderedDict(unpacker.entries(parts[0])),
        ),
        [OrderedDict],
    ),
    (Kind("defaultdict", _pack_defaultdict, _unpack_defaultdict), [defaultdict]),
    (
        Kind(
            "bytes", _pack_bytes, lambda parts, unpacker: unpacker.array(parts[0], "u1").tobytes()
        ),
        [bytes],
    ),
    (
        Kind(
            "bytearray",
            _pack_bytes,
            lambda parts, unpacker: bytearray(unpacker.array(parts[0], "u1")),
        ),
        [bytearray],
    ),
    # Integers past 64 bits and floats that JSON has no name for.
    (Kind("int", lambda v, _: [hex(v)], lambda parts, _: int(parts[0], 16)), [int]),
    (Kind("float", lambda v, _: [_float_bits(v)], lambda parts, _: _bits_float(parts[0])), [float]),
    (
        Kind(
            "complex",
            lambda v, _: [_float_bits(v.real), _float_bits(v.imag)],
            lambda parts, _: complex(_bits_float(parts[0]), _bits_float(parts[1])),
        ),
        [complex],
    ),
):
    add_kind(_kind, _types)
add_kind(Kind("namedtuple", _pack_namedtuple, _unpack_namedtuple), test=_is_namedtuple)
