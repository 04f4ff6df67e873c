"""What kind of value something is, and what it stores, read without running any code of it.

No property, ``__getattr__`` or method is called: what one of them would return is :data:`UNREAD`.
Nor is a resolver of the user's (:func:`~rlskip.config.check.readable`).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import functools
import itertools
import os
import re
import sys
import threading
import types
import weakref
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs
from omegaconf import DictConfig, ListConfig, OmegaConf

from rlskip.config.check import readable
from rlskip.skip.names import read_name, shaping_in

UNREAD = object()
"""Stands for a value that only code of the user's returns."""

type_of: Callable[[Any], Any] = type

NAMESPACES = (types.SimpleNamespace, Namespace)
_MEMBERS = (types.MemberDescriptorType, types.GetSetDescriptorType)

Kind = Literal[
    "leaf", "list", "dict", "config", "fields", "object", "holder", "function", "class", "weights",
    "neutral",
]  # fmt: skip
"""The kinds of values, by their class; one with `fields` declares which it has.

A holder gives another object on, with arguments maybe; the last three are neutral.
"""
_LISTS = (list, tuple, set, frozenset, deque)
_BARE = frozenset((*_LISTS, dict))  # they store nothing else
_RUNNING = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
_KINDS: tuple[tuple[Kind, Any], ...] = (
    ("class", (type, types.ModuleType)),
    ("neutral", (types.BuiltinFunctionType, types.MethodWrapperType)), ("object", threading.local),
    ("config", (DictConfig, ListConfig)), ("dict", dict), ("list", _LISTS),
    ("holder", (functools.partial, functools.partialmethod, staticmethod, classmethod)),
    ("holder", (property, functools.cached_property, type(functools.lru_cache(len)))),
    ("holder", (types.MethodType, weakref.ref, contextvars.ContextVar)),
    ("function", types.FunctionType),
)  # fmt: skip
# Packages of engines, weights, tokenizers, data, clients, and of what logs, waits and computes.
_PACKAGES = """
accelerate aiohttp anthropic asyncio concurrent datasets deepspeed httpx hydra io jax litellm
logging megatron mlflow multiprocessing numpy openai peft queue random ray requests rich rlskip
sglang socket subprocess swanlab tempfile tensorboard tensorboardX threading tokenizers torch
torchdata tqdm transformers trl unittest verl vllm wandb _asyncio _io _queue _random _thread
"""
_NEUTRAL_PACKAGES = frozenset(_PACKAGES.split())
# How the names of classes end, the user's own too.
_NEUTRAL_ENDINGS = (
    "Callback", "Callbacks", "Dataset", "DataLoader", "Dataloader", "Logger", "Meter", "Optimizer",
    "PreTrainedTokenizerBase", "ProcessorMixin", "Profiler", "Progress", "ProgressBar", "Timer",
    "Tokenizer", "Tracker", "Writer",
)  # fmt: skip
# Of most attributes of a class.
_USUAL = {property, types.NoneType, *_MEMBERS}
_WHOLE_CONFIG = {"skip", "rlskip", "hydra"}
_DECLARING = ("attr", "dataclasses", "msgspec", "pydantic_core")  # their marks of no default
_OF_PYDANTIC = ("__pydantic_extra__", "__pydantic_private__")
# What a subclass may have and be no other kind of object.
_NEUTRAL_METHODS = re.compile(r"__(?!call__|post_init__|getattr)\w+__|_abc_impl")


@functools.lru_cache(1 << 12)
def kind_of(cls: Any) -> Kind:
    """The kind of a class's objects: what can be looked into, and how; or that they are neutral."""
    from rlskip.format.fingerprint import is_text  # needs numpy

    single = (str, bytes, bytearray, enum.Enum, os.PathLike, types.NoneType)
    is_mock = cls.__module__ == "unittest.mock"  # which says that it is a path
    if not is_mock and (
        issubclass(cls, (*single, *_RUNNING)) or is_text(cls) or is_array_type(cls)
    ):
        return "leaf" if not cls.__module__.startswith("torch.nn.parameter") else "neutral"
    for kind, classes in _KINDS:
        if issubclass(cls, classes):
            return kind
    if declared_names(cls) is not None:
        return "fields"
    for base, _ in classes_of(cls):
        if base.__name__.endswith(_NEUTRAL_ENDINGS):
            return "neutral"
        if base.__module__.partition(".")[0] in _NEUTRAL_PACKAGES:
            is_weights = any(c.__module__ == "torch.nn.modules.module" for c in cls.__mro__)
            # What a class of the user's own adds to a library's may be sampling.
            return "weights" if is_weights or base is not cls else "neutral"
    return "object"


@functools.lru_cache(1 << 12)
def is_array_type(kind: type) -> bool:
    parts = ("dtype", "nbytes", "tolist")
    return not issubclass(kind, Mapping) and all(hasattr(kind, name) for name in parts)


def is_neutral(owner: Any) -> bool:
    """Whether a class or a module is of Python, or of a package with no sampling of its own.

    A module may be given by its name.
    """
    name = owner.__name__ if isinstance(owner, types.ModuleType) else owner
    package = (name if isinstance(name, str) else owner.__module__ or "").partition(".")[0]
    return package in _NEUTRAL_PACKAGES or package in sys.stdlib_module_names


@functools.lru_cache(1 << 12)
def is_sealed(kind: type) -> bool:
    """Whether a class keeps what its objects are where Python cannot read it, as C does."""
    names = {name for _, own in classes_of(kind) for name in own}
    readable = ("__dict__", "__slots__", "__next__", "__call__")
    return kind is not object and names.isdisjoint(readable)


def in_words(value: Any) -> str:
    """What a message calls a value that is not compared."""
    return "None" if value is None else f"a {type(value).__qualname__}"


def is_whole_config(fields: Any) -> bool:
    """Whether a value is the application's config: it has a node of rlskip's or Hydra's."""
    if not issubclass(type(fields), dict) or _WHOLE_CONFIG.isdisjoint(fields):
        return False
    return any(issubclass(type(fields.get(key)), Mapping) for key in _WHOLE_CONFIG)


def inside(value: Any, kind: Kind, most: int | None = None) -> dict[Any, Any] | None:
    """What a value stores by name, index or key, of a long one so many; None: it has no inside.

    What inherits from a list of Python's is one; any other sequence or mapping is not: its items
    are what code of its class returns.
    """
    if kind == "leaf":
        return None
    if kind == "class":
        return {}
    if kind == "holder":
        return held_by(value)
    if kind == "function":
        return _of_function(value)
    if kind == "config":
        return _entries(value)
    if kind == "dict":
        return dict(itertools.islice(dict.items(value), most))
    if kind == "list":
        cls = type_of(value)
        base: Any = next(base for base in _LISTS if issubclass(cls, base))
        names = getattr(cls, "_fields", itertools.count())
        return dict(itertools.islice(zip(names, base.__iter__(value), strict=False), most))
    if kind == "fields":
        return _declared_fields(value)
    if issubclass(type_of(value), threading.local):  # each thread has another
        return None
    return attributes_of(value)


def beside(value: Any, kind: Kind, parts: Mapping[Any, Any]) -> dict[str, Any]:
    """What an object stores besides its `parts`, and of its class what :func:`kept_by` has."""
    if type_of(value) in _BARE or kind in ("holder", "function", "config"):
        return {}
    if kind == "class":
        return kept_by(value, parts)
    own = attributes_of(value) if kind in ("leaf", "list", "dict", "fields") else {}
    added = {name: part for name, part in own.items() if name not in parts}
    return {**kept_by(type_of(value), {**own, **parts}), **added}


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
    if type(where) in _MEMBERS:
        found |= where.__get__(value)  # type: ignore[union-attr]
    for name in _OF_PYDANTIC:
        found |= found.pop(name, None) or {}
    return found


def kept_by(kind: Any, stored: Mapping[Any, Any]) -> dict[str, Any]:
    """What a class or a module keeps for all objects, besides what one of them has `stored`.

    What shapes rollouts by its name, `UNREAD` where it is computed; and of classes of the user's
    what is neither a single value nor called.
    """
    is_class = isinstance(kind, type)
    if not is_class and is_neutral(kind):  # torch alone has thousands of names
        return {}
    found: dict[str, Any] = {}
    classes = classes_of(kind) if is_class else [(kind, vars(kind))]
    if type(kind) not in (type, types.ModuleType):
        classes += classes_of(type(kind))  # the metaclass is asked last
    for owner, own in classes:
        is_users = is_class and not is_neutral(owner)
        for name, part in own.items():
            if type(part) is types.FunctionType or name[:2] == "__":  # most are
                continue
            bare, shapes, _ = read_name(name)
            if shapes and not callable(part):
                if type(part) not in _MEMBERS and {bare, f"_{bare}"}.isdisjoint(stored):
                    found.setdefault(name, UNREAD if hasattr(type(part), "__get__") else part)
            elif is_users and type(part) not in _USUAL:
                found.setdefault(name, part)
    if is_class:
        found = {**usual_fields(kind), **found}
    return {name: part for name, part in found.items() if name not in stored}


def _declared_fields(value: Any) -> dict[str, Any]:
    """The fields that the class of an object declares, as dataclasses and pydantic's models do."""
    kind, stored = type_of(value), attributes_of(value)
    if issubclass(kind, NAMESPACES):
        return stored
    if not (names := declared_names(kind)):
        return {k: v for k, v in stored.items() if k[:1] != "_" and k != "transformers_version"}
    return {name: stored.get(name, UNREAD) for name in names}


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


@functools.lru_cache(1 << 12)
def usual_fields(kind: type) -> dict[str, Any]:
    """The defaults of fields that a class declares where its attributes do not have them."""
    usual: Any = getattr(kind, "__struct_defaults__", ())
    found = dict(zip(reversed(declared_names(kind) or []), reversed(usual), strict=False))
    for _, own in classes_of(kind)[::-1]:
        fields = [*own.get("__dataclass_fields__", {}).items()]
        fields += own.get("__pydantic_fields__", {}).items()
        fields += [(field.name, field) for field in own.get("__attrs_attrs__", ())]
        found |= {name: field.default for name, field in fields}
    return {
        k: v for k, v in found.items() if type(v).__module__.partition(".")[0] not in _DECLARING
    }


def kind_name(kind: type) -> str:
    """The name of a class; for a subclass that adds nothing that of its base."""
    for cls, own in classes_of(kind):
        ours = {name for name in own if not _NEUTRAL_METHODS.fullmatch(name)}
        if cls.__base__ is object or ours or own.get("__annotations__"):
            return cls.__qualname__
    return kind.__qualname__


def _entries(node: DictConfig | ListConfig) -> dict[Any, Any]:
    """The entries of a node of OmegaConf; one that a resolver of the user's makes is as written."""
    content, whole = node._content, functools.cache(lambda: readable(node._get_root()))
    if not isinstance(content, dict | list):
        return {}

    def read(child: Any) -> Any:
        if child is None or not child._is_interpolation():
            is_node = isinstance(getattr(child, "_content", None), dict | list)
            return child if child is None or is_node else child._value()
        with contextlib.suppress(Exception):  # an interpolation that leads nowhere
            if isinstance(whole(), DictConfig):  # of a list it reads nothing
                return OmegaConf.select(whole(), child._get_full_key(None))
        return UNREAD

    parts = content.items() if isinstance(content, dict) else enumerate(content)
    return {key: read(child) for key, child in parts}


def held_by(value: Any) -> dict[Any, Any]:
    """What is given on by a partial, a bound method, a reference or a variable of a context."""
    if isinstance(value, contextvars.ContextVar):
        with contextlib.suppress(LookupError):  # it is not set, and has no default
            return {"": value.get()}
        return {}
    if isinstance(value, weakref.ref):
        return {"": weakref.ref.__call__(value)}
    if isinstance(value, types.MethodType):
        return {"": value.__self__, "_": value.__func__}
    given = dict[Any, Any]()
    if isinstance(value, functools.partial | functools.partialmethod):
        given = {**dict(enumerate(value.args)), **value.keywords}
    return {**given, "": passed_on(value)}


def passed_on(value: Any) -> Any:
    """What a holder passes its calls on to; None where it is not callable."""
    names = ("__func__", "func", "fget", "__wrapped__")
    return next((getattr(value, name) for name in names if hasattr(value, name)), None)


def _of_function(value: Any) -> dict[str, Any]:
    """What a closure holds, and what shapes rollouts among a function's defaults and attributes.

    One that rlskip or a library made around another, a stage, say, holds that one alone.
    """
    if "__wrapped__" in value.__dict__ and is_neutral(value.__globals__.get("__name__", "")):
        return {"": value.__wrapped__, **shaping_in(value.__dict__)}
    code, usual = value.__code__, value.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(usual) : code.co_argcount]
    by_name = {**dict(zip(names, usual, strict=True)), **(value.__kwdefaults__ or {})}
    objects = {k: part for k, part in by_name.items() if kind_of(type_of(part)) != "leaf"}
    return {**cells_of(value), **shaping_in(by_name), **objects, **shaping_in(value.__dict__)}


def cells_of(func: types.FunctionType) -> dict[str, Any]:
    """What the closure of a function holds."""
    found = {}
    for name, cell in zip(func.__code__.co_freevars, func.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is not set yet
            found[name] = cell.cell_contents
    return found
