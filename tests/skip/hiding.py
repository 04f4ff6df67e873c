"""Where sampling hides from who compares arguments."""

from __future__ import annotations

import collections
import functools
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import PosixPath
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from omegaconf import OmegaConf

from rlskip import SkipManager


class Plain:
    def __init__(self, temperature: float, **more: Any) -> None:
        self.temperature = temperature
        vars(self).update(more)


class Bare(Plain):
    pass


class Slotted:
    __slots__ = ("_temperature",)

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature


class Private:
    def __init__(self, temperature: float) -> None:
        self.__temperature = temperature


class Forwarding:
    """All that it is asked for is computed, and counted."""

    asked = 0

    def __init__(self, temperature: float) -> None:
        self._inner = Plain(temperature)

    def __getattr__(self, name: str) -> Any:
        Forwarding.asked += 1
        raise AttributeError(name)

    def __getattribute__(self, name: str) -> Any:
        Forwarding.asked += 1
        return object.__getattribute__(self, name)


class Computed:
    asked = 0

    def __init__(self, temperature: float) -> None:
        self.t = temperature

    @property
    def temperature(self) -> float:
        Computed.asked += 1
        return self.t


@dataclass
class Declared:
    temperature: float
    hook: Any = print


@dataclass
class Added(Declared):
    pass


class Options(NamedTuple):
    temperature: float
    hook: Any


class Policy(torch.nn.Module):
    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.generation_config = Plain(temperature)


def added(base: type, *content: Any) -> Callable[[float], Any]:
    """Makes plain data that has an attribute besides."""

    def make(temperature: float) -> Any:
        kept = type(base.__name__, (base,), {})(*content)
        kept.top_p = temperature
        return kept

    return make


def referred(value: float) -> Any:
    plain = Plain(value)
    KEPT.append(plain)
    return weakref.ref(plain)


KEPT: list[Any] = []
CLASS = {"__annotations__": {"a": int, "temperature": ClassVar[float]}, "a": 1}


def classwide(value: float) -> Any:
    return type("Classwide", (), {"temperature": value})()


def kept_by_class(value: Any) -> Any:
    return type("Classwide", (type("Base", (), {"kept": value}),), {})()


def marked(value: float) -> Any:
    def act() -> None: ...

    act.top_p = value  # type: ignore[attr-defined]
    return act


def closing(temperature: float) -> Any:
    return lambda: temperature


def sampled(prompts: Any, temperature: float) -> None: ...


def resolved(temperature: float) -> Any:
    return OmegaConf.create({"s": {"temperature": "${t}"}, "t": temperature, "f": "${counted:}"})


HIDING: dict[str, Callable[[float], Any]] = {
    "object": Plain,
    "slots": Slotted,
    "private": Private,
    "forwarding": Forwarding,
    "property": Computed,
    "class": classwide,
    "inherited": lambda t: type("Own", (type(classwide(0.7)),), {"temperature": t})(),
    "class itself": lambda t: type("Counted", (), {"n": t}),
    "class's nested": lambda t: type(kept_by_class({"inner": {"temperature": t}})),
    "class's mapping": lambda t: kept_by_class({"temperature": t}),
    "class's object": lambda t: kept_by_class(Plain(t)),
    "class's partial": lambda t: kept_by_class(staticmethod(functools.partial(sampled, top_p=t))),
    "partial method": lambda t: kept_by_class(functools.partialmethod(sampled, temperature=t)),
    "metaclass": lambda t: type("Meta", (type,), {"temperature": t})("Made", (), {}),
    "sealed": lambda t: zlib.compressobj(int(t * 10)),
    "default": lambda t: lambda temperature=t: None,
    "function's attribute": marked,
    "module": Policy,
    "declared": Declared,
    "nested": lambda t: Plain(0, inner=Plain(0, inner=SimpleNamespace(top_p=t, f=print))),
    "list": lambda t: [{"temperature": t}, print],
    "tuple": lambda t: (print, t),
    "mapping in a list": lambda t: [[{"x": Plain(t)}]],
    "partial": lambda t: functools.partial(sampled, temperature=t),
    "cached function": lambda t: functools.lru_cache(lambda temperature=t: None),
    "dotted name": lambda t: {"sampling.temperature": t, "f": print},
    "bound method": lambda t: Plain(t).__init__,  # type: ignore[misc]
    "closure": closing,
    "another stage": lambda t: SkipManager.annotate("inner")(closing(t)),
    "config": resolved,
    "list of a config": lambda t: OmegaConf.create([{"temperature": t}, "${counted:}"]),
    "list's attribute": added(list, [1]),
    "mapping's attribute": added(dict, {"a": 1}),
    "path's attribute": added(PosixPath, "a"),
    "undeclared": added(dataclass(type("Declared", (), {"__annotations__": {}}))),
    "undeclared mapping": lambda t: (
        (d := Declared(0, 0)) and vars(d).setdefault("z", {"n": t}) and d
    ),
    "named tuple": lambda t: Options(t, print),
    "named tuple's attribute": added(Options, 0, 0),
    "class variable": lambda t: dataclass(type("Declared", (), {**CLASS, "temperature": t}))(),
    "weak reference": referred,
    "view": lambda t: MappingProxyType({"temperature": t, "f": print}),
    "member's mapping": lambda t: Enum("Preset", {"A": {"temperature": t}})["A"],
    "member's object": lambda t: Enum("Preset", {"A": Plain(t)})["A"],
    "user's mapping": lambda t: collections.UserDict(temperature=t, f=print),
    "meta tensor": lambda t: {"temperature": torch.ones(int(t * 10), device="meta")},
}
"""Makers of a value that hides a temperature."""
