"""What kind of value something is, and what it stores, read without running any code of it.

No property, ``__getattr__`` or method is called: what one of them would return is :data:`UNREAD`.
Nor is a resolver of the user's (:func:`~rlskip.config.check.readable`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import itertools
import os
import types
from argparse import Namespace
from collections import deque
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

LEAF, LIST, DICT, CONFIG, FIELDS = "leaf", "list", "dict", "config", "fields"
OBJECT, HOLDER, FUNCTION, CLASS = "object", "holder", "function", "class"
WEIGHTS, MEANINGLESS = "weights", "neutral"
"""The kinds of values, by their class; one with `FIELDS` declares which it has.

A holder gives another object on, with arguments maybe; the last three are neutral.
"""
_LISTS = (list, tuple, set, frozenset, deque)
_SINGLE = (str, bytes, bytearray, enum.Enum, os.PathLike)
_KINDS: tuple[tuple[str, Any], ...] = (
    (CLASS, (type, types.ModuleType)),
    (MEANINGLESS, (types.BuiltinFunctionType, types.MethodWrapperType)),
    (CONFIG, (DictConfig, ListConfig)), (DICT, dict), (LIST, _LISTS),
    (HOLDER, (functools.partial, types.MethodType)), (FUNCTION, types.FunctionType),
)  # fmt: skip
_OF_ARRAYS = ("dtype", "nbytes", "tolist")
# Packages of engines, weights, tokenizers, data, clients, and of what logs, waits and computes.
_PACKAGES = """
accelerate aiohttp anthropic asyncio concurrent datasets deepspeed httpx hydra io jax litellm
logging megatron mlflow multiprocessing numpy openai peft queue random ray requests rich rlskip
sglang socket subprocess swanlab tempfile tensorboard tensorboardX threading tokenizers torch
torchdata tqdm transformers trl verl vllm wandb _asyncio _io _queue _random _thread
"""
_NEUTRAL_PACKAGES = frozenset(_PACKAGES.split())
_NEUTRAL_BASES = ("PreTrainedTokenizerBase", "ProcessorMixin")
# How the names of the user's own classes end.
_ENDINGS = (
    "Callback", "Callbacks", "Dataset", "DataLoader", "Dataloader", "Logger", "Meter", "Optimizer",
    "Profiler", "Progress", "ProgressBar", "Timer", "Tokenizer", "Tracker", "Writer",
)  # fmt: skip

_WHOLE_CONFIG = {"skip", "rlskip", "hydra"}
_MORE = ("__pydantic_extra__", "__pydantic_private__")


@functools.lru_cache(1 << 12)
def kind_of(cls: Any) -> str:
    """The kind of a class's objects: what can be looked into, and how; or that they are neutral."""
    from rlskip.store.comparable import is_text  # needs numpy

    if issubclass(cls, (*_SINGLE, types.NoneType)) or is_text(cls) or is_array_type(cls):
        return LEAF if not cls.__module__.startswith("torch.nn.parameter") else MEANINGLESS
    for kind, classes in _KINDS:
        if issubclass(cls, classes):
            return kind
    if declared_names(cls) is not None:
        return FIELDS
    for base, _ in classes_of(cls):
        package, name = base.__module__.partition(".")[0], base.__name__
        if name in _NEUTRAL_BASES or name.endswith(_ENDINGS):
            return MEANINGLESS
        if package in _NEUTRAL_PACKAGES:
            is_weights = any(c.__module__ == "torch.nn.modules.module" for c in cls.__mro__)
            # What a class of the user's own adds to a library's may be sampling.
            return WEIGHTS if is_weights or base is not cls else MEANINGLESS
    return OBJECT


@functools.lru_cache(1 << 12)
def is_array_type(kind: type) -> bool:
    return not issubclass(kind, Mapping) and all(hasattr(kind, name) for name in _OF_ARRAYS)


def parts_of(value: Any, kind: str, most: int | None = None) -> dict[Any, Any] | None:
    """What a list, a mapping, or an object with declared fields has, by index, key or name.

    Of a long list or mapping only so many. None for a value of another kind. What inherits from a
    list of Python's is one; any other sequence or mapping is not: its items are what code of its
    class returns.
    """
    if kind == CONFIG:
        return config_entries(value)
    if kind == DICT:
        return dict(itertools.islice(dict.items(value), most))
    if kind == LIST:
        items = base_of(type(value)).__iter__(value)
        names = getattr(type(value), "_fields", itertools.count())
        return dict(itertools.islice(zip(names, items, strict=False), most))
    return declared_fields(value) if kind == FIELDS else None


def base_of(cls: type) -> Any:
    """Which of Python's lists those of a class are."""
    return next(base for base in _LISTS if issubclass(cls, base))


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
    for more in [found[name] for name in _MORE if isinstance(found.get(name), dict)]:
        found |= more
    return found


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


def in_words(value: Any) -> str:
    """What a message calls a value that is not compared."""
    return f"a {type(value).__qualname__}"


def is_whole_config(fields: Any) -> bool:
    """Whether a value is the application's config: it has a node of rlskip's or Hydra's."""
    if not issubclass(type(fields), dict):
        return False
    return any(issubclass(type(fields.get(key)), Mapping) for key in _WHOLE_CONFIG)


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
