"""The kinds of a program's own data: dataclasses, named tuples, members of enums, paths, UUIDs.

The class of a value is looked up among those that the program has imported, and an instance is made
without a call of its code. Where the reader asks for no host's classes, a dataclass and a named
tuple come as mappings of their fields, and a member as its value.
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
from collections.abc import Callable
from inspect import getattr_static
from pathlib import Path
from typing import Any

from rlskip.format.codec import Kind, Node, Packer, Unpacker
from rlskip.format.dump_errors import UnknownTypeError


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


_PATHS = {c.__name__: c for c in (pathlib.PurePosixPath, pathlib.PureWindowsPath, type(Path()))}

KINDS = [
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
