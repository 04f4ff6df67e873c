"""The kinds of a program's own data: dataclasses, named tuples, members of enums, paths, UUIDs.

The class of a value is looked up among those that the program has imported. It is never imported,
and an instance is made without a call of its code. Where the reader asks for no host's classes, a
dataclass and a named tuple come as mappings of their fields, and a member as its value.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import functools
import pathlib
import sys
import types
import uuid
from collections.abc import Mapping
from typing import Any

from rlskip.format.codec import Kind, Node, Packer, Unpacker
from rlskip.format.dump_errors import UnknownTypeError

# -- classes -----------------------------------------------------------------------------


def _program_class(module: str, qualname: str) -> Any:
    """What a module that the program has imported has under a name; None without it."""
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = _members_of(found).get(name)
    return found


def _members_of(place: Any) -> Mapping[str, Any]:
    """The names in a module or class; no ``__getattr__`` of either is called."""
    if isinstance(place, type):
        return type.__getattribute__(place, "__dict__")  # type: ignore[no-any-return]
    if isinstance(place, types.ModuleType):
        return object.__getattribute__(place, "__dict__")  # type: ignore[no-any-return]
    return {}


def _check_findable(value: Any, packer: Packer) -> None:
    kind = type(value)
    if _program_class(kind.__module__, kind.__qualname__) is not kind:
        raise packer.unsupported(value, "its class is not where its name says, in a module")


def _unknown(module: str, qualname: str, what: str) -> UnknownTypeError:
    return UnknownTypeError(
        f"it holds a {module}.{qualname}, which is not known here as {what}",
        remedy=f"import {module} before the step; if the class has changed, generate it again",
    )


# -- dataclasses -------------------------------------------------------------------------


def _attribute(kind: type, name: str) -> Any:
    """What a class has under a name, itself or from a base; no descriptor is asked."""
    mro = type.__getattribute__(kind, "__mro__")
    return next((_members_of(base)[name] for base in mro if name in _members_of(base)), None)


def _fields_of(kind: Any) -> list[str] | None:
    """The names of a dataclass's fields; None for any other value.

    Classes with their own way to make or to end instances (``__new__``, ``__del__``) are left out.
    """
    if not isinstance(kind, type) or _attribute(kind, "__new__") is not object.__new__:
        return None
    if _attribute(kind, "__del__") or not isinstance(
        _attribute(kind, "__dataclass_fields__"), dict
    ):
        return None
    return [field.name for field in dataclasses.fields(kind)]


def _pack_dataclass(value: Any, packer: Packer) -> list[Node]:
    kind = type(value)
    _check_findable(value, packer)
    names = _fields_of(kind) or []
    slots = [name for name in copyreg._slotnames(kind) if hasattr(value, name)]  # type: ignore[attr-defined]
    others = {
        name
        for name in (*getattr(value, "__dict__", ()), *slots)
        if not isinstance(_attribute(kind, name), functools.cached_property)
    } - set(names)
    if others:
        raise packer.unsupported(
            value, f"it has attributes besides its fields: {', '.join(others)}"
        )
    nodes = [[n, packer.node(object.__getattribute__(value, n), f".{n}")] for n in names]
    return [kind.__module__, kind.__qualname__, nodes]


def _unpack_dataclass(parts: list[Node], unpacker: Unpacker) -> Any:
    module, qualname, nodes = parts
    values = dict(unpacker.entries(nodes))
    if not unpacker.make.host_classes:
        return values
    kind = _program_class(module, qualname)
    if _fields_of(kind) != list(values):
        raise _unknown(module, qualname, f"a dataclass of {', '.join(map(str, values))}")
    made = object.__new__(kind)
    for name, value in values.items():
        if isinstance(_attribute(kind, name), types.MemberDescriptorType):  # of __slots__
            object.__setattr__(made, name, value)
        else:
            object.__getattribute__(made, "__dict__")[name] = value
    return made


# -- enums -------------------------------------------------------------------------------


def _pack_member(value: enum.Enum, packer: Packer) -> list[Node]:
    kind = type(value)
    _check_findable(value, packer)
    if kind._member_map_.get(value.name) is not value:
        raise packer.unsupported(value, "it is a combination of members")
    return [kind.__module__, kind.__qualname__, value.name, packer.node(value._value_, ".value")]


def _unpack_member(parts: list[Node], unpacker: Unpacker) -> Any:
    module, qualname, name, node = parts
    value = unpacker.node(node)
    if not unpacker.make.host_classes:
        return value
    kind = _program_class(module, qualname)
    known = _members_of(kind).get("_member_map_", {}) if isinstance(kind, enum.EnumMeta) else {}
    member = known.get(name)
    # Not by `==`: not every value is equal to itself.
    if member is None or _stored(member._value_) != _stored(value):
        raise _unknown(module, qualname, f"an enum with {name} = {value!r:.60}")
    return member


def _stored(value: Any) -> list[Any]:
    packer = Packer()
    node = packer.node(value)
    return [node, *([a.spec, *(part.tobytes() for part in a.parts)] for a in packer.arrays)]


# -- named tuples ------------------------------------------------------------------------


def _is_namedtuple(kind: Any) -> bool:
    fields = _members_of(kind).get("_fields")
    return isinstance(fields, tuple) and kind.__bases__ == (tuple,)


def _pack_namedtuple(value: Any, packer: Packer) -> list[Node]:
    kind = type(value)
    _check_findable(value, packer)
    values = [packer.node(v, f".{f}") for f, v in zip(kind._fields, value, strict=True)]
    return [kind.__module__, kind.__qualname__, list(kind._fields), values]


def _unpack_namedtuple(parts: list[Node], unpacker: Unpacker) -> Any:
    module, qualname, fields, nodes = parts
    values = dict(zip(fields, map(unpacker.node, nodes), strict=True))
    if not unpacker.make.host_classes:
        return values
    kind = _program_class(module, qualname)
    if not _is_namedtuple(kind) or [*kind._fields] != fields:
        raise _unknown(module, qualname, f"a named tuple of {', '.join(map(str, fields))}")
    return tuple.__new__(kind, values.values())


# -- of the standard library -------------------------------------------------------------

_PATHS: dict[str, type[pathlib.PurePath]] = {
    kind.__name__: kind
    for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path()))
}

KINDS = [
    Kind("namedtuple", _is_namedtuple, _pack_namedtuple, _unpack_namedtuple),
    Kind(
        "path",
        lambda kind: kind in _PATHS.values(),
        lambda value, _: [type(value).__name__, str(value)],
        lambda parts, _: _PATHS[parts[0]](parts[1]),
    ),
    Kind("uuid", uuid.UUID, lambda value, _: [value.hex], lambda parts, _: uuid.UUID(parts[0])),
    Kind(
        "dataclass", lambda kind: _fields_of(kind) is not None, _pack_dataclass, _unpack_dataclass
    ),
    Kind("member", lambda kind: issubclass(kind, enum.Enum), _pack_member, _unpack_member),
]
