"""A stage's other arguments are a part of what a replay compares."""

from __future__ import annotations

import enum
import functools
import logging
import re
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import attrs
import numpy as np
import pytest
import torch

from rlskip import SkipManager
from rlskip.errors import ConfigError, MismatchError
from tests.skip.trainers import visit


class Mode(enum.Enum):
    GREEDY = 1
    SAMPLED = 2


def tone(template: str) -> enum.Enum:
    class Tone(enum.Enum):
        POLITE = 1

        def __init__(self, number: int) -> None:
            self.template, self.fallback = template, self

    return Tone.POLITE


@dataclass
class Sampling:
    temperature: float = 1.0
    stop: tuple[str, ...] = ()


@attrs.define
class Attributes:
    temperature: float


@dataclass
class Beams(Sampling):
    beams: int = 1


Pair, Other = (NamedTuple(name, [("a", int)]) for name in ("Pair", "Other"))
BIG = np.zeros(1 << 17)
WIDE = "x" * 300


class Struct:
    """As msgspec's structs say which fields they have."""

    __struct_fields__ = ("temperature",)

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature


class GenerationConfig:
    """As that of transformers: all that it stores is declared."""

    def __init__(self, temperature: float, **more: Any) -> None:
        self.temperature = temperature
        vars(self).update(more)


class Broken:
    @property
    def __dict__(self) -> Any:
        raise ValueError


def nested(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


@pytest.fixture
def calls(init: Callable[..., Path]) -> Callable[..., str]:
    """``calls(function, *args, **kwargs)``: of a new run's call "generated", "replayed", or why."""

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
        ran: list[int] = []
        init(wait_s=0, at=1)
        try:
            function(ran, *args, **kwargs)
        except MismatchError as error:
            return error.what
        return "generated" if ran else "replayed"

    return call


def stage(**options: Any) -> Callable[..., Any]:
    """A stage with two defaults and any further arguments."""

    def generate(
        ran: list[int],
        prompts: list[int],
        n: int = 4,
        temperature: float = 1.0,
        images: Any = None,
        engine: Any = None,
        **more: Any,
    ) -> int:
        ran.append(1)
        return len(ran)

    options.setdefault("ignore", [])
    annotate = SkipManager.annotate(
        role="rollout", stage="generate", **{**options, "ignore": ["ran", *options["ignore"]]}
    )
    return annotate(generate)


EQUAL: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"n": 4}),
    ({"n": 4, "temperature": 1.0}, {}),
    ({"n": 2}, {"n": np.int64(2)}),
    ({"temperature": 0.5}, {"temperature": torch.tensor(0.5)}),
    ({"x": Mode.GREEDY}, {"x": Mode.GREEDY}),
    ({"x": Sampling(0.5)}, {"x": Sampling(0.5)}),
    ({"x": [1, {"a": None}]}, {"x": (1, {"a": None})}),
    ({"step": 1, "seed": 1}, {"global_step": 2, "seed": 2, "device": "cuda"}),
    (
        {"output_dir": "a", "pbar": None, "callbacks": [], "logger": None, "progress": True},
        {"output_dir": "b", "pbar": 1, "callbacks": [print], "logger": print},
    ),
    ({"x": torch.nn.Linear(1, 1)}, {"x": torch.nn.Linear(1, 1)}),
    ({"x": print}, {"x": len}),
    ({"cfg": {"skip": {"steps": 1}}}, {"cfg": {"skip": {"steps": 2}}}),
    ({"x": np.zeros(10**6)}, {"x": np.ones(10**6)}),
    ({"x": Broken()}, {"x": Broken()}),
    ({"x": torch.ones(2, device="meta")}, {"x": torch.zeros(2, device="meta")}),
    ({"x": nested(3000)}, {"x": nested(4000)}),
    (
        {"x": GenerationConfig(1, transformers_version="a")},
        {"x": GenerationConfig(1, transformers_version="b")},
    ),
    ({"x": {"loss": 0.5, "model": print}}, {"x": {"loss": 0.6, "model": print}}),
    ({"x": {"a": [0], "s": {"seed": 1}}}, {"x": {"a": [0], "s": {"seed": 2}}}),
    ({"x": [{"seed": 1}]}, {"x": [{}]}),
    ({"x": Namespace(device=1, save_dir="a")}, {"x": Namespace(device=2, save_dir="b")}),
    ({"x": [Namespace(created_at=1)]}, {"x": [Namespace(created_at=2)]}),
    ({"x": MagicMock(), "y": ...}, {"x": MagicMock(), "y": ...}),
    ({"x": {"a": [{"use_tqdm": True}]}}, {"x": {"a": [{}]}}),
    ({"engine": None}, {}),
    ({}, {"engine": print}),
    ({"images": [print]}, {"images": BIG}),
]
OTHER: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"x": 1}, {"x": True}, "x: True now, 1"),
    ({"x": None}, {}, "x: absent now, None"),
    ({}, {"top_k": 5}, "top_k: 5 now, absent"),
    ({"x": Mode.GREEDY}, {"x": Mode.SAMPLED}, "x: '<Mode.SAMPLED 2>' now"),
    ({"x": tone("a")}, {"x": tone("b")}, "x.template: 'b' now, 'a' in"),
    ({"x": Sampling(0.5)}, {"x": Sampling(0.6)}, "x.temperature: 0.6 now, 0.5"),
    ({"x": SimpleNamespace(k=1)}, {"x": Namespace(k=2)}, "x.k: 2 now"),
    ({"x": Decimal("1.5")}, {"x": Decimal("1.6")}, "x: \"<Decimal('1.6')>\" now"),
    ({"x": deque([1])}, {"x": deque([2])}, "x: [2] now, [1]"),
    ({"x": Attributes(0.5)}, {"x": Attributes(0.6)}, "x.temperature: 0.6 now, 0.5"),
    ({"x": Struct(0.5)}, {"x": Struct(0.6)}, "x.temperature: 0.6 now, 0.5"),
    ({"x": GenerationConfig(0.5)}, {"x": GenerationConfig(0.6)}, "x.temperature: 0.6 now, 0.5"),
    (
        {"x": GenerationConfig(0.5, f=print)},
        {"x": GenerationConfig(0.6, f=print)},
        "x.temperature: 0.6 now, 0.5",
    ),
    ({"x": {"s.n": 1, "f": print}}, {"x": {"s.n": 2, "f": print}}, "x.s.n: 2 now"),
    ({"x": {"s": {"n": 1}, "f": print}}, {"x": {"s": {"n": 2}, "f": print}}, "x.s.n: 2 now"),
    ({}, {"images": BIG}, "images: '<not compared>' now, None in"),
    ({"images": BIG}, {}, "images: None now, '<not compared>' in"),
    ({"images": [1]}, {"images": BIG}, "images: '<not compared>' now, [1] in"),
    ({}, {"images": {"f": print}}, "images: '<not compared>' now"),
    ({}, {"x": BIG}, "x: '<not compared>' now, absent"),
    ({"x": Sampling()}, {"x": Beams()}, "x.<type>: 'Beams' now, 'Sampling' in"),
    ({"x": [{"a": Pair(1)}]}, {"x": [{"a": Other(1)}]}, "x: [{'a': {'<type>': 'Other', 'a': 1}}]"),
    ({"x": re.compile(WIDE + "a")}, {"x": re.compile(WIDE + "b")}, "x: "),
    ({"x": re.compile("a")}, {"x": re.compile("a", re.IGNORECASE)}, "x: "),
    ({"x": {"skip": 1}}, {"x": {"skip": 2}}, "x.skip: 2 now, 1 in"),
    ({"x": [{"skip": 1, "f": print, "n": 1}]}, {"x": []}, "x: [] now"),
]


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        *((*pair, "replayed") for pair in EQUAL),
        *((a, b, f"arguments.{why}") for a, b, why in OTHER),
    ],
)
def test_arguments_of_every_kind(calls: Any, first: Any, second: Any, said: str) -> None:
    assert calls(stage(), [1], **first) == "generated"
    assert said in calls(stage(), [1], **second)


def test_what_a_partial_gives_its_function_counts(calls: Any) -> None:
    def generate(mode: str, ran: list[int], prompts: list[int], n: int = 4) -> None:
        ran.append(1)

    def given(*args: Any, **kwargs: Any) -> Any:
        ignore = ["ran", *kwargs.pop("ignore", [])]
        annotate = SkipManager.annotate("rollout", "prompts", stage="generate", ignore=ignore)
        return annotate(functools.partial(generate, *args, **kwargs))

    assert calls(given("greedy", n=2), [1]) == "generated"
    assert calls(given("greedy"), [1], n=2) == "replayed"
    assert calls(given("sampled", n=2, ignore=["mode"]), [1]) == "replayed"
    assert "arguments.mode: 'sampled' now, 'greedy'" in calls(given("sampled", n=2), [1])
    assert "arguments.n: 3 now, 2 in the dump" in calls(given("greedy", n=3), [1])


def test_a_dump_that_was_made_before_a_name_was_ignored_is_replayed(calls: Any) -> None:
    assert calls(stage(), [1], 5, 0.7, x={"temperature": 1, "f": print}) == "generated"
    for ignore in (["n", "temperature", "x"], ["*"]):
        assert calls(stage(ignore=ignore), [1]) == "replayed"
    assert "arguments.x.temperature" in calls(stage(ignore=["n", "temperature"]), [1])
    with pytest.raises(ConfigError, match="has no argument temprature"):
        calls(annotated(ignore=["ran", "temprature"])(lambda ran, prompts, temperature=1: 0), [1])


def test_a_part_of_plain_data_may_be_ignored(init: Any, calls: Any) -> None:
    first, second = ({"a": {"tag": tag, "k": 1}, "tone": tag} for tag in "ab")
    assert calls(stage(), [1], x=first) == "generated"
    init(wait_s=0, at=2)
    stage()([], [1], x=first)  # whose prompts are no way out
    visit(1)
    with pytest.raises(MismatchError, match=r"'skip\.ignore=\[x\.a\.tag,x\.tone\]' says"):
        stage()([], [1], x=second)
    assert calls(stage(ignore=["x.a.tag", "x.tone"]), [1], x=second) == "replayed"
    second["a"]["k"] = 2
    assert "x.a.k: 2 now" in calls(stage(ignore=["x.a.tag", "x.tone"]), [1], x=second)


def test_a_default_that_was_edited_is_a_mismatch_and_a_new_one_is_not(calls: Any) -> None:
    annotate = SkipManager.annotate(role="rollout", stage="generate", ignore=["ran"])
    extended = annotate(lambda ran, prompts, n=4, temperature=1.0, top_p=1.0: None)
    assert calls(stage(), [1]) == "generated"
    assert calls(extended, [1]) == "replayed"
    assert "arguments.top_p: 0.5 now, absent" in calls(extended, [1], top_p=0.5)
    edited = annotate(lambda ran, prompts, n=2: None)
    assert "arguments.n: 2 now, 4 in the dump" in calls(edited, [1])


def test_a_dump_that_records_no_arguments_is_replayed_with_one_warning(
    calls: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert calls(stage(), [1], 2) == "generated"
    store = SkipManager.store("rollout")
    meta = store.read_meta(1)
    assert meta is not None
    by_hand = attrs.evolve(meta.identity, noted={})
    store.quarantine(1, "for a test")
    store.save(1, 1, identity=by_hand)
    caplog.clear()
    assert calls(stage(), [1], 3) == "replayed"
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    (line,) = [line for line in lines if "arguments" in line]
    assert "the dump does not record arguments.n" in line


def annotated(prompts: Any = None, ignore: Any = ("ran",), **options: Any) -> Any:
    return SkipManager.annotate("rollout", prompts, stage="stage", ignore=ignore, **options)


class Holder:
    """Stages whose prompts are a part of their object, or are computed."""

    batch = ("a",)

    def stage(self, options: Any, *, ran: list[int]) -> None:
        ran.append(1)

    of_self = annotated(lambda self, *_, **__: self.batch)(stage)
    computed = annotated(lambda self, options, ran: [*self.batch])(stage)


class Request:
    """Its class does not say which fields it has."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


def of_request(request: Any, *, ran: list[int]) -> None:
    ran.append(1)


def with_rest(*args: Any, ran: list[int], **more: Any) -> None:
    ran.append(1)


named = annotated("batch")(lambda temperature, batch, prompts=None, *, ran: ran.append(1))
within = annotated(lambda request, ran: request["ids"])(of_request)
within_object = annotated(lambda request, ran: request.ids)(of_request)
after_step = annotated()(lambda step, batch, *, ran: ran.append(1))
by_keyword = annotated()(with_rest)
own = annotated(
    lambda texts, seed, ran: sorted(texts), identity=lambda texts, seed, ran: {"seed": seed}
)(lambda texts, seed, *, ran: ran.append(1))
indexed = annotated()(lambda index, n=4, *, ran: ran.append(1))


def supplying(function: Any) -> Any:
    @functools.wraps(function)
    def supplied(prompts: Any, *, ran: list[int]) -> Any:
        return function("policy", prompts, ran=ran)

    return annotated()(supplied)


def forwarding(function: Any) -> Any:
    @functools.wraps(function)
    def forwarded(*args: Any, **kwargs: Any) -> Any:
        return function("policy", *args, **kwargs)

    return annotated()(forwarded)


@supplying
@forwarding
def twice_below(policy: str, other: str, prompts: Any, *, ran: list[int]) -> None:
    assert policy == other == "policy"
    ran.append(1)


@forwarding
def below(policy: str, prompts: Any, *, ran: list[int]) -> None:
    assert policy == "policy"
    ran.append(1)


@pytest.mark.parametrize(
    ("function", "first", "second", "differs"),
    [
        (named, (1.0, ["a"]), (0.0, ["a"]), "arguments.temperature: 0.0 now, 1.0 in"),
        (named, (1.0, ["a"], 1), (1.0, ["a"], 2), "arguments.prompts: 2 now, 1 in"),
        (named, (1.0, ["a"]), (1.0, ["b"]), "prompts: "),
        (named, (print, ["a"]), {"temperature": len, "batch": ["a"]}, ""),
        (own, ({"a", "b"}, 1), {"texts": {"b", "a"}, "seed": 1}, ""),
        (own, ({"a", "b"}, 1), ({"a", "b"}, 2), "identity.seed: 2 now, 1 in the dump"),
        (Holder().of_self, (1.0,), (0.0,), "arguments.options: 0.0 now, 1.0 in"),
        (Holder().of_self, ({"a": 1},), ({"a": 2},), "arguments.options.a: 2 now, 1 in"),
        (Holder().computed, (1.0,), (0.0,), "arguments.options: 0.0 now, 1.0 in"),
        (Holder().computed, ({"uid": 1},), ({"uid": 2},), ""),
        (within, ({"ids": [1], "x": 1},), ({"ids": [1], "x": 2},), ""),
        (within, ({"ids": [1], "n": 1},), ({"ids": [1], "n": 2},), "arguments.request.n: 2 now"),
        (within_object, (Request(ids=[1], n=1),), (Request(ids=[1], n=2),), "arguments.request.n"),
        (within_object, (Request(ids=[1], x=1),), (Request(ids=[1], x=2),), ""),
        (after_step, (1, BIG), (1, BIG + 1), "prompts: "),
        (after_step, (1, ["a"]), (2, ["a"]), ""),
        (by_keyword, {"prompts": BIG}, {"prompts": BIG + 1}, "prompts: "),
        (by_keyword, {"prompts": BIG, "n": 1}, {"prompts": BIG, "n": 2}, "arguments.n: 2 now"),
        (below, (["a"],), (["b"],), "prompts: "),
        (twice_below, (["a"],), (["b"],), "prompts: "),
        (indexed, (2,), {"index": 2, "n": 2}, "arguments.n: 2 now, 4 in"),
    ],
)
def test_what_holds_the_prompts_is_told_from_what_shapes_the_rollouts(
    calls: Any, function: Any, first: Any, second: Any, differs: str
) -> None:
    def call(ran: list[int], given: Any) -> None:
        kwargs = given if isinstance(given, dict) else {}
        function(*(() if kwargs else given), ran=ran, **kwargs)

    assert calls(call, first) == "generated"
    assert calls(call, first) == "replayed"
    assert (differs or "replayed") in calls(call, second)


@pytest.mark.parametrize(
    "given",
    [{"index": 2, "n": BIG}, {"index": "a text", "n": {"ids": BIG}}],
    ids=["a number", "a text"],
)
def test_a_batch_is_not_left_out_for_a_number_that_is_taken_for_the_prompts(
    calls: Any, given: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"name the argument .*annotate\(prompts='n'\)"):
        calls(lambda ran: indexed(ran=ran, **given))
    with pytest.raises(ConfigError, match=r"'args', which is not a batch, .*'batch' is too large"):
        calls(lambda ran: by_keyword(ran=ran, batch=BIG))


def test_an_attached_functions_arguments_count_but_those_it_ignores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, init: Callable[..., Path]
) -> None:
    code = "ran = []\ndef generate(model, batch, tag, n=1):\n    ran.append(n)\n    return n\n"
    (tmp_path / "attached_stage.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    import attached_stage  # type: ignore[import-not-found]

    def call(batch: dict[str, Any], tag: str, n: int) -> Any:
        node = {"target": "attached_stage:generate", "prompts": "batch.ids"}
        init(attach={"rollout": node}, ignore=["tag"], wait_s=0, at=1)
        return attached_stage.generate(print, batch, tag, n)

    assert call({"ids": [1], "x": 1}, "a", 2) == 2
    assert call({"ids": [1], "x": 2}, "b", 2) == 2
    assert attached_stage.ran == [2]
    with pytest.raises(MismatchError, match=r"arguments\.n: 3 now, 2 in the dump"):
        call({"ids": [1]}, "a", 3)
