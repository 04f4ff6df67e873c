"""The kinds of Python, of numpy and of a program's own data.

Long lists of numbers or texts, and lists of such lists (token ids), are packed into arrays.

The class of a dataclass, a named tuple or a member of an enum is looked up among those that the
program has imported, and an instance is made without a call of its code. Where the reader asks for
no host's classes, the first two come as mappings of their fields (a key as a tuple of their
values), and a member as its value.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import functools
import math
import struct
import sys
import types
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from inspect import getattr_static
from itertools import accumulate, chain, pairwise
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np

from rlskip.batch.columns import objects_of
from rlskip.format.codec import Kind, Node, Packer, Unpacker, as_key
from rlskip.format.dump_errors import UnknownTypeError

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
    counts = lengths.tolist()
    if min(counts, default=0) < 0:  # many runs could each be all of it
        raise ValueError("a run of impossible length")
    return [flat[start:end] for start, end in pairwise(accumulate(counts, initial=0))]


def _collection(kind: type) -> Kind:
    is_set = kind in (set, frozenset)

    def unpack(unpacker: Unpacker, *parts: Node) -> Any:
        items = _unpack_list(unpacker, *parts)
        return kind(map(as_key, items) if is_set else items)

    return Kind(kind.__name__, kind, _pack_set if is_set else _pack_list, unpack)


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
    return unpacker.once(content, lambda raw: raw.view(_dtype(name)).reshape(shape))  # type: ignore[no-any-return]


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


# -- a program's own data ---------------------------------------------------------------------


def _class_at(module: str, qualname: str) -> Any:
    """What a module that the program has imported has under a name; None without it."""
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        # No `__getattr__` of a module or a class is called.
        found = vars(found).get(name) if isinstance(found, type | types.ModuleType) else None
    return found


def _names(value: Any, packer: Packer) -> list[Node]:
    """Where the class of a value is found again."""
    kind = type(value)
    if _class_at(kind.__module__, kind.__qualname__) is not kind:
        raise packer.unsupported(value, "its class is not where its name says, in a module")
    return [kind.__module__, kind.__qualname__]


def _found(module: str, qualname: str, fits: Callable[[Any], bool], what: str) -> Any:
    """The class of a value in this process, if it `fits`."""
    kind = _class_at(module, qualname)
    if not fits(kind):
        raise UnknownTypeError(
            f"it holds a {module}.{qualname}, which is not known here as {what}",
            remedy=f"import {module} before the step; if the class has changed, generate it again",
        )
    return kind


def _fields_of(kind: Any) -> list[str] | None:
    """The names of the fields of a dataclass or a named tuple; None for any other value.

    Dataclasses with their own ``__new__`` or ``__del__`` are left out.
    """
    if not isinstance(kind, type):
        return None
    if kind.__bases__ == (tuple,) and isinstance(vars(kind).get("_fields"), tuple):
        return [*kind._fields]  # type: ignore[attr-defined]
    if not dataclasses.is_dataclass(kind) or hasattr(kind, "__del__"):
        return None
    is_plain = kind.__new__ is object.__new__
    return [field.name for field in dataclasses.fields(kind)] if is_plain else None


def _pack_fields(value: Any, packer: Packer) -> list[Node]:
    kind = type(value)
    names = _fields_of(kind) or []
    slots = [name for name in copyreg._slotnames(kind) if hasattr(value, name)]  # type: ignore[attr-defined]
    own = {*getattr(value, "__dict__", ()), *slots} - {*names}
    is_cache = functools.cached_property
    if others := [n for n in own if not isinstance(getattr_static(kind, n, None), is_cache)]:
        what = f"it has attributes besides its fields: {', '.join(others)}"
        raise packer.unsupported(value, what)
    parts = value if issubclass(kind, tuple) else [object.__getattribute__(value, n) for n in names]
    named = zip(names, parts, strict=True)
    return [*_names(value, packer), [[name, packer.node(part, f".{name}")] for name, part in named]]


def _unpack_fields(unpacker: Unpacker, module: str, qualname: str, entries: Node) -> Any:
    values = dict(unpacker.entries(entries))
    if unpacker.into != "host":
        return values
    what = f"a class with the fields {', '.join(map(str, values))}"
    kind = _found(module, qualname, lambda kind: _fields_of(kind) == [*values], what)
    if issubclass(kind, tuple):
        return tuple.__new__(kind, values.values())
    made = object.__new__(kind)
    for name, value in values.items():
        if isinstance(getattr_static(kind, name, None), types.MemberDescriptorType):  # of __slots__
            object.__setattr__(made, name, value)
        else:
            made.__dict__[name] = value
    return made


def _pack_member(value: enum.Enum, packer: Packer) -> list[Node]:
    if type(value)._member_map_.get(value.name) is not value:
        raise packer.unsupported(value, "it is a combination of members")
    return [*_names(value, packer), value.name, packer.node(value._value_, ".value")]


def _unpack_member(unpacker: Unpacker, module: str, qualname: str, name: str, content: Node) -> Any:
    value = unpacker.node(content)
    if unpacker.into != "host":
        return value

    def fits(kind: Any) -> bool:
        member = kind._member_map_.get(name) if isinstance(kind, enum.EnumMeta) else None
        # Not by `==`: not every value is equal to itself.
        return member is not None and repr(member._value_) == repr(value)

    what = f"an enum with {name} = {value!r:.60}"
    return _found(module, qualname, fits, what)._member_map_[name]


_PATHS = {c.__name__: c for c in (PurePosixPath, PureWindowsPath, type(Path()))}

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
    Kind(
        "path",
        lambda kind: kind in _PATHS.values(),
        lambda value, _: [type(value).__name__, str(value)],
        lambda _, name, text: _PATHS[name](text),
    ),
    Kind("uuid", uuid.UUID, lambda value, _: [value.hex], lambda _, digits: uuid.UUID(digits)),
    Kind("fields", lambda kind: _fields_of(kind) is not None, _pack_fields, _unpack_fields),
    Kind("member", lambda kind: issubclass(kind, enum.Enum), _pack_member, _unpack_member),
]
