"""What objects store, read without running any code of theirs.

No property, ``__getattr__`` or method is called: what one of them would return is :data:`UNREAD`.
Nor is a resolver of the user's (:func:`~rlskip.config.check.readable`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import types
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from omegaconf import DictConfig, ListConfig, OmegaConf

from rlskip.config.check import readable

UNREAD = object()
"""Stands for a value that only code of the user's returns."""

type_of: Callable[[Any], Any] = type

NAMESPACES = (types.SimpleNamespace, Namespace)
MEMBERS = (types.MemberDescriptorType, types.GetSetDescriptorType)

_EXTRA = "__pydantic_extra__"
# What a subclass may have and be no other kind of object.
_NEUTRAL_METHODS = re.compile(r"__(?!call__|post_init__|getattr|annotations__)\w+__|_abc_impl")


def classes_of(kind: type) -> list[tuple[type, Mapping[str, Any]]]:
    """A class and its bases but `object`, each with what it defines itself."""
    return [(cls, vars(cls)) for cls in kind.__mro__[:-1]]


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes that an instance has itself: its ``__dict__`` and its slots."""
    found: dict[str, Any] = {}
    where = None
    for _, own in classes_of(type(value)):
        where = where or own.get("__dict__")
        if "__slots__" in own or "__struct_fields__" in own:
            for name, member in own.items():
                if type(member) is types.MemberDescriptorType:
                    with contextlib.suppress(AttributeError):  # it was never set
                        found.setdefault(name, member.__get__(value))
    if type(where) in MEMBERS:
        found |= where.__get__(value)  # type: ignore[union-attr]
    extra = found.get(_EXTRA)
    return {**found, **extra} if isinstance(extra, dict) else found


def declared_fields(value: Any) -> dict[str, Any] | None:
    """The fields that the class of an object declares; None if it declares none.

    Parameters for sampling often are such objects: dataclasses, attrs' classes, vLLM's
    SamplingParams (msgspec), pydantic's models, transformers' GenerationConfig.
    """
    kind = type_of(value)
    if (names := declared_names(kind)) is None:
        return None
    stored = attributes_of(value)
    if issubclass(kind, NAMESPACES):
        return stored
    if not names:
        return {k: v for k, v in stored.items() if k[:1] != "_" and k != "transformers_version"}
    usual = {k: v for _, own in reversed(classes_of(kind)) for k, v in own.items() if k in names}
    usual = {k: UNREAD if hasattr(type(v), "__get__") else v for k, v in usual.items()}
    return {name: stored.get(name, usual.get(name, UNREAD)) for name in names}


@functools.lru_cache(1 << 12)
def declared_names(kind: type) -> list[str] | None:
    """The names that a class declares; an empty list: all that an object of it stores."""
    if issubclass(kind, NAMESPACES):
        return []
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    if attrs.has(kind):
        return [field.name for field in attrs.fields(kind)]
    if isinstance(names := getattr(kind, "__struct_fields__", None), tuple):
        return list(names)
    theirs = {"BaseModel": "pydantic", "GenerationConfig": ""}
    named = [c for c in kind.__mro__ if c.__name__ in theirs]
    return [] if any(c.__module__.startswith(theirs[c.__name__]) for c in named) else None


def kind_name(kind: type) -> str:
    """The name of a class; for a subclass that adds nothing that of its base."""
    for cls, own in classes_of(kind):
        ours = {name for name in own if not _NEUTRAL_METHODS.fullmatch(name)}
        if cls.__base__ is object or ours - {"__annotations__"} or own.get("__annotations__"):
            return cls.__qualname__
    return kind.__qualname__


def in_words(value: Any) -> str:
    """What a message calls a value that is not compared."""
    return f"a {type(value).__qualname__}"


def config_entries(node: DictConfig | ListConfig) -> dict[Any, Any]:
    """The entries of a node of OmegaConf; one that a resolver of the user's makes is as written."""
    content = node._content
    whole: list[Any] = []
    if not isinstance(content, dict | list):
        return {}

    def read(child: Any) -> Any:
        if child is None or not child._is_interpolation():
            is_node = isinstance(child, DictConfig | ListConfig) and isinstance(
                child._content, dict | list
            )
            return child if child is None or is_node else child._value()
        with contextlib.suppress(Exception):  # an interpolation that leads nowhere
            whole[:] = whole or [readable(node._get_root())]
            if isinstance(whole[0], DictConfig):  # of a list it reads nothing
                return OmegaConf.select(whole[0], child._get_full_key(None))
        return UNREAD

    parts = content.items() if isinstance(content, dict) else enumerate(content)
    return {key: read(child) for key, child in parts}
