"""The kinds of Python: numbers, text, containers, named tuples.

Long lists of one type of number, or of text, are packed into arrays, and so are lists of such
lists (token ids per row).
"""

from __future__ import annotations

import struct
import sys
import types
from collections import OrderedDict, defaultdict, namedtuple
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
from rlskip.format.dump_errors import UnknownTypeError

# The most classes of named tuples, and the most fields of one, that are made for a file, and bytes
# of a class and of a field of it.
_MAX_TWINS, _TWIN, _FIELD = 1000, 1 << 14, 1 << 11

# Bytes of an object, with its place in a list and in a slice of that list, for each byte of the
# array that it is made from. A run is a list, and the number that is its end.
_NUMBER, _STRING, _RUN = 6, 10, 14
_CHARACTER = 5  # one wide character makes every character of its string take four bytes


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
        (nodes,) = rest
        return [unpacker.node(node) for node in nodes]
    if form == "str":
        return _unpack_strings(rest, unpacker)
    if form in ("float", "int"):
        numbers = unpacker.array(rest[0], "f8" if form == "float" else "i8")
        unpacker.charge(_NUMBER * numbers.nbytes)
        return list(numbers.tolist())
    if form == "runs":
        counts = unpacker.array(rest[0], "i8")
        unpacker.charge(_RUN * counts.nbytes)
        return _cut(unpacker.list_of(rest[1]), counts)
    raise ValueError(f"a list of the form {form!r}")


def _cut(flat: Any, counts: np.ndarray) -> list[Any]:
    """`flat` cut into runs of these lengths."""
    if len(counts) and (counts.min() < 0 or counts.max() > 2**40):
        raise ValueError("a run of impossible length")
    ends = [0, *np.cumsum(counts).tolist()]
    if ends[-1] != len(flat):
        raise ValueError("runs do not add up")
    return [flat[a:b] for a, b in pairwise(ends)]


def _pack_strings(values: Sequence[str], packer: Packer) -> list[Node]:
    encoded = [value.encode("utf-8", "surrogatepass") for value in values]
    counts = np.fromiter(map(len, encoded), np.int64, len(encoded))
    text = np.frombuffer(b"".join(encoded), np.uint8)
    return [packer.array(counts, "i"), packer.array(text, "x")]


def _unpack_strings(parts: list[Node], unpacker: Unpacker) -> list[str]:
    counts = unpacker.array(parts[0], "i8")
    raw = unpacker.array(parts[1], "u1")
    unpacker.charge(_STRING * counts.nbytes + _CHARACTER * raw.nbytes)
    text = raw.tobytes()
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
    return [packer.array(np.frombuffer(bytes(value), np.uint8), "x")]


def _is_namedtuple(kind: type) -> bool:
    return kind.__bases__ == (tuple,) and isinstance(getattr(kind, "_fields", None), tuple)


def _pack_namedtuple(value: Any, packer: Packer) -> list[Node]:
    kind = type(value)
    values = [packer.node(v, f".{f}") for f, v in zip(kind._fields, value, strict=True)]
    return [kind.__module__, kind.__qualname__, list(kind._fields), values]


def _unpack_namedtuple(parts: list[Node], unpacker: Unpacker) -> Any:
    """An instance of the class itself if the program has imported it, else of a twin.

    The class is looked up, never imported, and its instance is made without calling its code.
    """
    module, qualname, fields, nodes = parts
    names = tuple(fields)
    kind = program_class(module, qualname)
    if members_of(kind).get("_fields") != names or kind.__bases__ != (tuple,):
        kind = _twin(module, qualname, names, unpacker)
    if len(nodes) != len(names):
        raise ValueError("a named tuple of another length")
    return tuple.__new__(kind, [unpacker.node(node) for node in nodes])


def _twin(module: str, qualname: str, names: tuple[str, ...], unpacker: Unpacker) -> type:
    """A class like the one of that name, which this program has not imported."""
    twins = unpacker.twins
    if (qualname, names) not in twins:
        name = qualname.rsplit(".", 1)[-1]
        twin: Any = None
        if len(twins) < _MAX_TWINS and len(names) <= _MAX_TWINS:
            unpacker.charge(_TWIN + _FIELD * len(names))
            twin = unpacker.outside(namedtuple, name, names, rename=True, module=module)
        if twin is None or twin._fields != names:
            raise UnknownTypeError(
                f"it holds a {module}.{qualname}, which is not known here as a named tuple",
                remedy=f"import {module} before the step",
            )
        twins[qualname, names] = twin
    return twins[qualname, names]


def program_class(module: str, qualname: str) -> Any:
    """What a module that the program has imported has under a name; None without it."""
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = members_of(found).get(name)
    return found


def members_of(place: Any) -> Mapping[str, Any]:
    """The names in a module or class; no ``__getattr__`` of either is called."""
    if isinstance(place, type):
        return type.__getattribute__(place, "__dict__")  # type: ignore[no-any-return]
    if isinstance(place, types.ModuleType):
        return object.__getattribute__(place, "__dict__")  # type: ignore[no-any-return]
    return {}


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
    Kind("namedtuple", _is_namedtuple, _pack_namedtuple, _unpack_namedtuple),
]
