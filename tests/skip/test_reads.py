"""What a stage reads, however it reaches it, is compared, or its change is said."""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlskip import SkipManager
from rlskip.errors import MismatchError
from tests.skip.conftest import each_in_turn
from tests.skip.trainers import visit

PROGRAM = """
import attrs, contextvars, enum, functools, os, sys, threading, types
from os import getenv as env
class Holder:
    def __init__(self, **more): vars(self).update(more)
class Policy:
    def __init__(self): self.drawn = 0
    def draw(self): return VALUE * 0 + {0}
    def __call__(self): return {0}
    @property
    def computed(self): return {0}
class Other(Policy):
    def draw(self): return {0}
class Made:
    def __init__(self): self.kept = {0}
def seen(f):
    @functools.wraps(f)
    def wrapped(*args): return f(*args), {0}
    return wrapped
VALUE, BRIEF, T, VAR = 1, "be {0}", {0}, contextvars.ContextVar("top_p", default={0})
OBJECT, MAPPING = Holder(inner=Holder(policy=Policy())), {{"a": Holder(policy=Policy())}}
LOCAL, ACT = threading.local(), Holder(act=lambda: {0})
STAGES, SETTINGS = [Policy()], {{"temperature": {0}}}
TEMPERATURE, SAMPLER = {0}, Holder(temperature={0}, style={0})
class Config: top_p, style = {0}, "a"
class Spoken: tone, unread = "{0}", {0}
Tone = enum.Enum("Tone", {{"A": {0}}})
PAIR, LOW, SPACE = [{0}, 1], {{0.5: None}}.get({0}, 1), types.SimpleNamespace(tone={0}, unread={0})
VIEW = types.MappingProxyType({{"top_k": {0}}})
Preset = enum.Enum("Preset", {{"A": {{"top_k": {0}}}}})
Declared = attrs.make_class("Declared", {{"n": attrs.field(), "top_k": attrs.field(default={0})}})
class Above:
    def draw(self): return {0}
class Below(Above):
    def draw(self): return super().draw()
class Entered:
    def __enter__(self): return {0}
    def __exit__(self, *_): pass
def entered():
    with Entered(): pass
@functools.singledispatch
def chosen(value): pass
@chosen.register
def _(value: int): return {0}
MODULE = types.ModuleType("settings")
MODULE.top_k, MODULE.client = {0}, Holder(top_k=id(Config), style=id(Config))
LOCAL.top_p = sys.modules["rlskip_test_reads"].TOP_P = {0}
os.environ["TOP_K"] = os.environ["MAX_LEN"] = "{0}"
def imported():
    from rlskip_test_reads import TOP_P
    return TOP_P
def missing():
    import rlskip_test_missing
def making(top_k): return lambda: top_k
made = making({0})
@functools.lru_cache
def cached(): return {0}
@seen
def decorated(): return 1
def usual(sampler=Holder(top_p={0})): return sampler.top_p
"""
CODE = "the code of "
READS = {
    "OBJECT.inner.policy.draw()": CODE,
    "MAPPING['a'].policy.draw()": CODE,
    "ACT.act()": CODE,
    "OBJECT.inner.policy.computed": CODE,
    "STAGES[0]()": CODE,
    "Other().draw()": CODE,
    "Made().kept": CODE,
    "cached()": CODE,
    "made()": ".top_k: 0.6 now, 0.5 in the dump",
    "SETTINGS['temperature']": "SETTINGS.temperature: 0.6 now, 0.5 in the dump",
    "TEMPERATURE": "arguments.TEMPERATURE: 0.6 now, 0.5 in the dump",
    "SAMPLER and 1": "arguments.SAMPLER.temperature: 0.6 now, 0.5 in the dump",
    "Config and 1": "arguments.Config.top_p: 0.6 now, 0.5 in the dump",
    # Of a module the settings count, and no object that it has besides.
    "MODULE and 1": "arguments.MODULE.top_k: 0.6 now, 0.5 in the dump",
    "decorated()": CODE,
    "usual()": "usual.sampler.top_p: 0.6 now, 0.5 in the dump",
    "imported()": "rlskip_test_reads.TOP_P: 0.6 now, 0.5 in the dump",
    "len and missing and 1": "rlskip_test_missing (a module that is not imported yet)",
    "VAR.get()": "VAR: 0.6 now, 0.5 in the dump",
    "LOCAL.top_p": "LOCAL",
    "os.environ['TOP_K']": "os.environ.TOP_K: '0.6' now, '0.5' in the dump",
    "os.getenv('MAX_LEN')": "os.environ.MAX_LEN (a str)",
    "env('TOP_K')": "os.environ.TOP_K: '0.6' now, '0.5' in the dump",
    "PAIR[0]": "reads.PAIR: '<",
    "LOW": "reads.LOW: 1 now, None in the dump",
    "Tone.A and 1": "reads.Tone.A: '<",
    "Spoken.tone": "reads.Spoken.tone: '<",
    "SPACE.tone": "reads.SPACE.tone: 0.6 now, 0.5 in the dump",
    "VIEW['top_k']": "VIEW.top_k: 0.6 now, 0.5 in the dump",
    "Preset.A and 1": ".A.top_k: 0.6 now, 0.5 in the dump",
    "Declared(1) and 1": "Declared.top_k: 0.6 now, 0.5 in the dump",
    "Below().draw()": CODE,
    "entered()": CODE,
    "chosen(1)": CODE,
    "T": "reads.T: 0.6 now, 0.5 in the dump",
    "BRIEF": "reads.BRIEF: '<",
}
"""What a stage reads, and what is said of its change."""

STAGES = {
    "function": "def stage(prompts): return {0}",
    "async": "async def stage(prompts): return {0}",
    "method": "class Trainer:\n    def stage(self, prompts): return {0}\nstage = Trainer().stage",
    "partial": "def under(x, prompts): return {0}\nstage = functools.partial(under, 1)",
    "wrapped": "@seen\ndef stage(prompts): return {0}",
    "closing": "def closing(f): return lambda prompts: f(prompts)\n"
    "@closing\ndef stage(prompts): return {0}",
    "nested": "def stage(prompts):\n    def within(): return {0}\n    return [within()]",
}


@pytest.fixture
def run(
    init: Callable[..., Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """``run(program)``: what is said of a new run's call of its stage."""
    monkeypatch.setitem(sys.modules, "rlskip_test_reads", types.ModuleType("rlskip_test_reads"))
    for name in ("TOP_K", "MAX_LEN"):
        monkeypatch.setenv(name, "")

    def call(program: str, typed: Any = (), **skip: Any) -> str:
        there: dict[str, Any] = {"__name__": "rlskip_test_program"}
        exec(program, there)
        annotate = SkipManager.annotate("rollout", "prompts", stage="stage", ignore=typed)
        init(wait_s=0, at=1, **skip)
        caplog.clear()
        try:
            result = annotate(there["stage"])([1])
            if inspect.iscoroutine(result):
                asyncio.run(result)
        except MismatchError as error:
            return error.what
        return "\n".join(r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)

    return call


@pytest.mark.parametrize(("read", "stage"), each_in_turn(READS, STAGES))
def test_a_change_of_what_is_read_is_said(run: Any, read: str, stage: str) -> None:
    first, other = ((PROGRAM + STAGES[stage].format(read)).format(v) for v in (0.5, 0.6))
    run(first)
    again = run(first)
    assert CODE not in again
    assert " now, " not in again
    assert READS[read] in run(other)


def test_what_was_counted_or_named_otherwise_is_no_change(run: Any) -> None:
    """Of a stage that reads them all: comments, order, and what has nothing to do with it."""
    body = PROGRAM + STAGES["function"].format(f"[{', '.join(READS)}]")
    program = body.format(0.5)
    run(program)
    same = program.replace("{{", "{").replace("def usual", "# A comment.\ndef usual")
    same += "\ndef unread(): return OTHER\nOTHER = SPACE.unread = Spoken.unread = PAIR[1] = 1.0\n"
    said = run(same)
    assert CODE not in said
    assert " now, " not in said
    # What the warning says to type works, also for what only a helper reads.
    ignored = ["rlskip_test_missing", "os.environ.MAX_LEN", "LOCAL", "BRIEF"]
    for way in ({"ignore": ignored}, {"typed": ignored}):
        said = run(same.replace("be 0.5", "be brief"), **way)
        assert "not compared, so" not in said
        assert " now, " not in said


def test_a_change_of_what_is_read_of_self_is_said(run: Any) -> None:
    stage = (
        "class Trainer:\n    unread = {0}\n    def __init__(self): self.tone = {0}\n"
        "    def stage(self, prompts): return self.tone\nstage = Trainer().stage"
    )
    run(stage.format(1))
    assert " now, " not in run(stage.format(1))
    said = run(stage.format(2))
    assert "reads.self.tone: 2 now, 1 in the dump" in said
    assert "unread" not in said


def test_what_is_read_of_self_is_that_of_each_object(
    init: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    class Player:
        def __init__(self, name: str) -> None:
            self.name, self.calls = name, 0

        @SkipManager.annotate("rollout", stage="stage")
        def draw(self, prompts: list[int]) -> str:
            self.calls += 1
            return self.name

    for order, said in (("ab", ()), ("ab", ()), ("ba", "ba")):
        init(wait_s=0)
        caplog.clear()
        players = {name: Player(name) for name in order}
        for step in (1, 2):
            visit(step)
            for player in players.values():
                player.draw([1])
        changed = [r.getMessage() for r in caplog.records if " now, " in r.getMessage()]
        assert [line.partition("reads.")[2][:9] for line in changed] == ["self.name"] * len(said)


def test_a_module_that_is_imported_earlier_or_later_is_no_mismatch(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (PROGRAM + STAGES["function"].format("missing()")).format(0.5)
    module = types.ModuleType("rlskip_test_missing")
    module.TOP_P = 0.5  # type: ignore[attr-defined]
    for is_there in (True, False, True):
        if is_there:
            monkeypatch.setitem(sys.modules, "rlskip_test_missing", module)
        else:
            monkeypatch.delitem(sys.modules, "rlskip_test_missing")
        assert " now, " not in run(program.replace("missing\n", "missing as m\n    m.TOP_P\n"))


def test_stages_of_one_factory_are_read_each_by_itself(init: Callable[..., Path]) -> None:
    """They have one name and one code, and each has a closure of its own."""

    def made(temperature: float) -> Callable[[list[int]], list[float]]:
        return SkipManager.annotate("rollout", stage="stage")(lambda prompts: [temperature])

    def job(*temperatures: float) -> None:
        init(wait_s=0)
        for step, temperature in enumerate(temperatures, 1):
            visit(step)
            assert made(temperature)([1]) == [temperature]

    job(0.5, 0.5)
    with pytest.raises(MismatchError, match=r"step 2 .*temperature: 0\.9 now, 0\.5 in the dump"):
        job(0.5, 0.9)


def test_code_of_many_names_is_read(run: Any) -> None:
    """Of more than 255 names, the interpreter writes a number in two instructions."""
    many = "".join(f"        name_{i} = global_{i}\n" for i in range(300))
    for top_p in (0.5, 0.6):
        said = run(
            f"TOP_P = {top_p}\ndef stage(prompts):\n    if not prompts:\n{many}"
            "    import json.decoder\n    return TOP_P\n"
        )
    assert "TOP_P: 0.6 now, 0.5 in the dump" in said
