"""`wrap`: functions of modules that know nothing of rlskip, imported before or after."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest

from rlskip._wrap import AttachError, Seam, Seams, around, wrap
from rlskip.errors import ConfigError

TRAINER = """
    class Base:
        def inherited(self, x):
            return ["inherited", x]

    class Trainer(Base):
        factor = 2

        def method(self, x):
            return ["method", x]

        @staticmethod
        def static(x):
            return ["static", x]

        @classmethod
        def of_class(cls, x):
            return [cls.__name__, x]

        class Inner:
            def method(self, x):
                return ["inner", x]

    def function(x):
        return ["function", x]
"""


def marking(mark):
    def decorate(func):
        @functools.wraps(func)
        def wrapper(*args, **kwargs):
            return [mark, *func(*args, **kwargs)]

        return wrapper

    return decorate


@pytest.mark.parametrize("imported_before", [False, True])
def test_wraps_functions_and_methods_of_every_kind(third_party, imported_before):
    name = third_party(TRAINER)
    if imported_before:
        importlib.import_module(name)
    paths = ["Trainer.method", "Trainer.static", "Trainer.of_class", "Trainer.inherited"]
    for path in [*paths, "Trainer.Inner.method", "function"]:
        wrap(f"{name}:{path}", marking("wrapped"), key="test")
    assert (name in sys.modules) is imported_before
    module = importlib.import_module(name)
    trainer = module.Trainer()
    assert trainer.method(1) == ["wrapped", "method", 1]
    assert trainer.static(1) == module.Trainer.static(1) == ["wrapped", "static", 1]
    assert trainer.of_class(1) == module.Trainer.of_class(1) == ["wrapped", "Trainer", 1]
    assert trainer.inherited(1) == ["wrapped", "inherited", 1]
    assert trainer.Inner().method(1) == ["wrapped", "inner", 1]
    assert module.function(1) == ["wrapped", "function", 1]
    assert module.Base().inherited(1) == ["inherited", 1]


def test_the_same_key_wraps_once_and_another_key_again(third_party):
    name = third_party(TRAINER)
    target = f"{name}:Trainer.method"
    wrap(target, marking("a"), key="a")
    wrap(target, marking("a"), key="a")
    module = importlib.import_module(name)
    wrap(target, marking("a"), key="a")
    assert module.Trainer().method(1) == ["a", "method", 1]
    wrap(target, marking("b"), key="b")
    wrap(target, marking("a"), key="a")
    assert module.Trainer().method(1) == ["b", "a", "method", 1]


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("Trainr.method", "module {name} has no 'Trainr'"),
        ("Trainer.metod", "{name}:Trainer has no 'metod'"),
        ("Trainer.Iner.method", "{name}:Trainer has no 'Iner'"),
        ("functon", "module {name} has no 'functon'"),
        ("Trainer.factor", "'factor' is not a function: 2"),
        ("Trainer", "'Trainer' is not a function"),
    ],
)
def test_a_missing_part_is_named_when_the_module_is_imported(third_party, path, what):
    name = third_party(TRAINER)
    wrap(f"{name}:{path}", marking("wrapped"), key="test")
    with pytest.raises(AttachError) as caught:
        importlib.import_module(name)
    assert str(caught.value).startswith(f"{name}:{path}: {what.format(name=name)}")
    assert name not in sys.modules


@pytest.mark.parametrize("text", ["", "module", "module:", ":f", "a b:f", "m:f()", "m:1f", "m.f"])
def test_a_target_that_names_no_function_is_refused(text):
    with pytest.raises(ConfigError, match=r"package\.module:Class\.method"):
        wrap(text, marking("wrapped"), key="test")


@pytest.mark.parametrize("outer_is_async", [False, True])
@pytest.mark.parametrize("inner_is_async", [False, True])
def test_around_a_coroutine_function_is_one(outer_is_async: bool, inner_is_async: bool) -> None:
    def double(x: int) -> int:
        return 2 * x

    async def adouble(x: int) -> int:
        return 2 * x

    def body(function: Callable[..., Any], x: int) -> Any:
        return function(x + 1)

    async def abody(function: Callable[..., Any], x: int) -> Any:
        doubled = function(x + 1)
        return await doubled if inner_is_async else doubled

    inner = adouble if inner_is_async else double
    outer = around(abody if outer_is_async else body)(inner)
    assert inspect.iscoroutinefunction(outer) is (outer_is_async or inner_is_async)
    assert (outer.__name__, inspect.signature(outer)) == (inner.__name__, inspect.signature(inner))
    result: Any = outer(1)
    assert (asyncio.run(result) if inspect.iscoroutine(result) else result) == 4


def test_a_seam_whose_body_does_not_call_the_trainers_own_was_called(third_party):
    """As a replay: only a place that the trainer never passes is named at the first step."""
    name = third_party(TRAINER)
    table = [
        Seam(f"{name}:{path}", path, role="rollout") for path in ("function", "Trainer.method")
    ]
    seams = Seams(name, table)
    for seam in table:
        seams.around(seam.target)(lambda *_: "replayed")
    seams.attach()
    module = importlib.import_module(name)
    assert module.function(1) == "replayed"
    assert [seam.purpose for seam in seams.uncalled("rollout")] == ["Trainer.method"]
