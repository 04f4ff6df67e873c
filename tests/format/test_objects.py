"""Dataclasses, members of enums, paths and UUIDs come back as what they were, without code."""

from __future__ import annotations

import enum
import functools
import gc
import pathlib
import sys
import types
import uuid
from collections import namedtuple
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
import torch

from rlskip.runs.opened import Run
from rlskip.store import StepStore, UnknownTypeError, UnsupportedTypeError

T = TypeVar("T")
ran: list[str] = []


class Stop(enum.Enum):
    LENGTH = "length"
    EOS = ("eos", 2)
    NAN = float("nan")  # not equal to itself


Turn = namedtuple("Turn", ["role", "pass_rate"])


class Mode(str, enum.Enum):
    GREEDY = "greedy"


class Flags(enum.IntFlag):
    A = 1
    B = 2


@dataclass
class Base:
    tokens: Any
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Frozen:
    stop: Stop
    where: Path


@dataclass
class Rollouts(Base, Generic[T]):
    parts: list[Frozen] = field(default_factory=list)
    derived: int = field(init=False)

    def __post_init__(self) -> None:
        ran.append("post_init")
        self.derived = len(self.parts)

    @functools.cached_property
    def total(self) -> int:
        return len(self.parts)

    class Inner(enum.IntEnum):
        ONE = 1


@dataclass
class Slotted:
    __slots__ = ("cache", "tokens")
    tokens: Any


@dataclass
class Ender:
    x: int


VALUES: dict[str, Any] = {
    "members": [*Stop, Mode.GREEDY, Flags.B, Rollouts.Inner.ONE],
    "named tuples": [Turn("user", 0.5), {Turn("a", 1): Turn([1], None)}],
    "paths": [Path("/a/b"), Path(), pathlib.PurePosixPath("x/y"), pathlib.PureWindowsPath("c:/x")],
    "uuids": [uuid.UUID(int=0), uuid.UUID(int=2**128 - 1)],
    "a dataclass": Rollouts([1, 2], 0.5, [Frozen(Stop.EOS, Path("z"))]),
    "a dataclass of slots": Slotted([1, 2]),
    "keys": {Mode.GREEDY: 1, Frozen(Stop.EOS, Path("z")): {Stop.LENGTH}},
}


@pytest.mark.parametrize("name", VALUES)
def test_it_comes_back_as_it_was(store: StepStore, name: str) -> None:
    value = VALUES[name]
    store.save(1, {"x": value})
    ran.clear()
    found = store.load(1)["x"]
    assert found == value
    assert type(found) is type(value)
    if isinstance(value, list):
        assert list(map(type, found)) == list(map(type, value))
    assert ran == [], "none of its code was called"


def test_a_stage_may_return_a_dataclass_of_tensors(store: StepStore) -> None:
    value = Rollouts(torch.arange(6).reshape(2, 3), 1.5)
    assert value.total == 0, "a cached property is computed again"
    store.save(1, value)
    found = store.load(1)
    assert type(found) is Rollouts
    assert torch.equal(found.tokens, value.tokens)
    assert (found.seconds, found.derived, found.total) == (1.5, 0, 0)


def test_the_command_line_sees_plain_data(store: StepStore) -> None:
    store.save(1, VALUES["a dataclass"])
    (dump,) = Run(store.directory).dumps()
    part = {"stop": ("eos", 2), "where": Path("z")}
    assert dump.load() == {"tokens": [1, 2], "seconds": 0.5, "parts": [part], "derived": 1}


# A module that is there when a dump is made, with classes like those above.
THEN = (
    "import collections, dataclasses, enum\n"
    "Turn = collections.namedtuple('Turn', ['a', 'b'])\n"
    "@dataclasses.dataclass\nclass Result:\n    a: int\n    b: int\n"
    "class Stop(enum.Enum):\n    EOS = 1\n"
)


@pytest.mark.parametrize("value", ["Result(1, 2)", "Stop.EOS", "Turn(1, 2)"])
@pytest.mark.parametrize(
    "change",
    [
        "",  # not imported
        "import dataclasses\n@dataclasses.dataclass\nclass Result:\n    a: int\n",
        "import collections\nTurn = collections.namedtuple('Turn', ['b', 'a'])\n",
        "import enum\nclass Stop(enum.Enum):\n    EOS = 2\nclass Result(enum.Enum):\n    a = 1\n",
        "Result = Stop = Turn = print",
        "class Result:\n    def __new__(cls): raise SystemExit\nStop = Turn = Result",
    ],
)
def test_a_class_that_is_not_there_or_has_changed_is_named(
    store: StepStore, monkeypatch: pytest.MonkeyPatch, value: str, change: str
) -> None:
    for source in (THEN, change):
        module = types.ModuleType("of_the_trainer")
        monkeypatch.setitem(sys.modules, "of_the_trainer", module)
        exec(source, module.__dict__)
        if source is THEN:
            store.save(1, [eval(value, module.__dict__)])
    if not change:
        monkeypatch.delitem(sys.modules, "of_the_trainer")
    with pytest.raises(UnknownTypeError) as caught:
        store.load(1)
    assert f"of_the_trainer.{value[:4]}" in caught.value.what
    assert "import of_the_trainer" in caught.value.remedy
    assert store.steps() == [1], "it is sound: it stays"


def test_what_is_not_plain_is_refused_with_its_place_and_the_alternatives(store: StepStore) -> None:
    @dataclass
    class Local:
        x: int

    @dataclass
    class Own(Base):
        def __new__(cls, *_: Any) -> Any:
            return object.__new__(cls)

    @dataclass
    class Ends(Base):
        def __del__(self) -> None:
            ran.append("del")

    more = Base([1])
    more.note = "kept nowhere"  # type: ignore[attr-defined]
    slotted = Slotted([1])
    slotted.cache = "kept nowhere"
    refused: dict[str, tuple[Any, str]] = {
        "a local class": (Local(1), "where its name says"),
        "its own __new__": (Own(1), "Own"),
        "its own __del__": (Ends(1), "Ends"),
        "an attribute that is no field": (more, "note"),
        "a slot that is no field": (slotted, "cache"),
        "a combination of flags": (Flags.A | Flags.B, "combination"),
        "a part of it": (Base(tokens=object()), "object"),
    }
    for what, (value, word) in refused.items():
        with pytest.raises(UnsupportedTypeError) as caught:
            store.save(1, [value])
        assert word in caught.value.what, what
        assert "mappings or dataclasses" in caught.value.remedy, what
    assert caught.value.where == "rollouts[0].tokens"
    for items in (iter([1]), (i for i in [1]), map(str, [1])):
        with pytest.raises(UnsupportedTypeError) as caught:
            store.save(1, {"x": items})
        assert "return a list" in caught.value.remedy
    assert store.steps() == []


def test_a_forged_dump_makes_no_instance_that_acts_when_it_ends(store: StepStore) -> None:
    """The class of a dump that was sound, changed since to one with a destructor."""
    store.save(1, [Ender(1)])
    gc.collect()  # the one that was saved
    Ender.__del__ = lambda self: ran.append("del")  # type: ignore[attr-defined]
    try:
        ran.clear()
        with pytest.raises(UnknownTypeError):
            store.load(1)
        gc.collect()
        assert ran == []
    finally:
        del Ender.__del__  # type: ignore[attr-defined]
