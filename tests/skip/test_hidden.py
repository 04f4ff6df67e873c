"""Sampling that hides in objects is compared or named; nothing of the user's runs for that."""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tqdm import tqdm

from rlskip import SkipManager
from rlskip.errors import MismatchError
from tests.skip.conftest import each_in_turn
from tests.skip.hiding import HIDING, Added, Bare, Computed, Declared, Forwarding, Plain
from tests.skip.trainers import visit

annotate = SkipManager.annotate("rollout", "prompts", stage="generate", ignore=["ran"])


class Trainer:
    def __init__(self, value: Any) -> None:
        self.sampler = value

    def generate(self, prompts: Any, ran: list[int]) -> None:
        ran.append(1)


class Decorated(Trainer):
    generate = annotate(Trainer.generate)


def own_loop(value: Any, ran: list[int]) -> None:
    computed = SkipManager.annotate("rollout", lambda p, *_: p, stage="generate", ignore=["ran"])
    computed(lambda prompts, sampler, ran: ran.append(1))([1], value, ran)


def rest(value: Any, ran: list[int]) -> None:
    annotate(lambda prompts, *args, ran: ran.append(1))([1], value, ran=ran)


def method(value: Any, ran: list[int]) -> None:
    Decorated(value).generate([1], ran)


def owned(value: Any, ran: list[int]) -> None:
    annotate(Trainer(value).generate)([1], ran)


def partial(value: Any, ran: list[int]) -> None:
    generate = functools.partial(lambda sampler, prompts, ran: ran.append(1), value)
    annotate(generate)([1], ran=ran)


def closure(value: Any, ran: list[int]) -> None:
    annotate(lambda prompts, ran: (ran.append(1), value)[0])([1], ran)


LOOPS = (own_loop, rest, method, partial, owned, closure)


@pytest.fixture
def run(init: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> Callable[..., str]:
    """``run(loop, value)``: a new run's call; what it warns of, "generated", or a mismatch."""

    def call(loop: Any, value: Any, **skip: Any) -> str:
        ran: list[int] = []
        init(wait_s=0, at=1, **skip)
        caplog.clear()
        try:
            loop(value, ran)
        except MismatchError as error:
            return error.what
        lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        ours = [line for line in lines if "not compared, so" in line or "the code of" in line]
        return "generated" if ran else "\n".join(ours)

    return call


@pytest.fixture(autouse=True)
def resolver() -> Any:
    asked: list[int] = []
    OmegaConf.register_new_resolver("counted", lambda: asked.append(1))
    yield asked
    OmegaConf.clear_resolver("counted")
    assert not asked


@pytest.mark.parametrize(("place", "loop"), each_in_turn(HIDING, LOOPS))
def test_what_hides_is_a_mismatch_or_named(run: Any, place: str, loop: Any) -> None:
    make = HIDING[place]
    first, equal, other = make(0.5), make(0.5), make(0.6)
    Forwarding.asked = Computed.asked = 0
    assert run(loop, first) == "generated"
    said = run(loop, equal)
    again = run(loop, other)
    if not re.search(r"0\.6\W* now, .*0\.5\W* in the dump", again):
        assert said == again
        where = {rest: "args", method: "self.", owned: "self.", closure: "value"}
        assert where.get(loop, "sampler") in said
    assert Forwarding.asked == Computed.asked == 0


class TrainingArguments(Plain):
    """As that of transformers."""


def bare(prompts: Any) -> None: ...


NEUTRAL = [
    (TrainingArguments(1.0, beta1=1), TrainingArguments(1.0, beta1=2)),
    (tqdm(range(3), disable=True), tqdm(range(4), initial=2, disable=True)),
    (logging.getLogger("a"), logging.getLogger("b")),
    (print, len),
    (functools.lru_cache(len), functools.lru_cache(abs)),
    (type("MyCallback", (), {"n": 1})(), type("MyCallback", (), {"n": 2})()),
    (torch.device("cpu"), torch.device("meta")),
    (threading.Lock(), threading.Lock()),
    (torch.nn.Linear(1, 1), torch.nn.Linear(2, 2)),
    (torch.optim.SGD([torch.ones(1)], lr=1), torch.optim.SGD([torch.ones(1)], lr=2)),
    (Plain(1.0), Bare(1.0)),
    (Plain(1.0, n=1, top_p=2), Plain(1.0, top_p=2, n=1)),
    (Declared(1.0), Added(1.0)),
    ({"n": 1, "top_p": 2}, {"top_p": 2, "n": 1}),
    (Plain(1.0, save_dir="a", logger=1), Plain(1.0, save_dir="b", logger=2)),
    (Plain(1.0, step=1, epoch=2), Plain(1.0, step=2, epoch=3)),
    (type("PreTrainedTokenizerBase", (), {"n": 1})(), print),
    (SkipManager.annotate("inner")(bare), SkipManager.annotate("other")(bare)),
]


@pytest.mark.parametrize("loop", [own_loop, method, closure])
def test_what_is_neutral_is_no_mismatch_and_not_named(run: Any, loop: Any) -> None:
    # All in one mapping: as an argument it is not plain data, so its parts are looked into.
    def given(number: int) -> Any:
        return {f"part_{i}": pair[number] for i, pair in enumerate(NEUTRAL)}

    assert run(loop, given(0)) == "generated"
    assert run(loop, given(1)) == ""


def test_what_is_left_is_said_once_with_what_to_type(
    run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def loop(sampler: Any, ran: list[int]) -> None:
        own_loop(sampler, ran)
        visit(2)
        own_loop(sampler, ran)

    run(loop, Plain(1.0, style="a", tone="b"))
    said = run(loop, Plain(1.0, style="c", tone="d"))
    assert len(said.splitlines()) == 1
    assert "not compared, so other values replay the same dump: " in said
    assert "sampler.style (a str), sampler.tone (a str); annotate(identity=...)" in said
    assert "'skip.ignore=[sampler.style,sampler.tone]'" in said
    assert run(loop, Plain(1.0, style="c"), ignore=["sampler.style"]) == ""
    assert run(loop, Plain(0.0, style="c"), ignore=["sampler"]) == ""
    assert run(loop, Plain(0.0, style="c"), own={"ignore": ["*"]}) == ""


def test_ignore_and_identity_of_the_stage_silence_it(run: Any) -> None:
    def loop(options: Any, ran: list[int]) -> None:
        own = SkipManager.annotate("rollout", stage="generate", **{"ignore": ["ran"], **options})
        own(lambda prompts, sampler, ran: ran.append(1))([1], Plain(1.0, style="a"), ran)

    assert run(loop, {}) == "generated"
    assert "sampler.style" in run(loop, {})
    for options in ({"ignore": ["ran", "sampler.style"]}, {"identity": {}}):
        assert run(loop, options) == ""


def test_an_attribute_that_the_stage_reads_is_named_where_it_is_none(run: Any) -> None:
    def loop(style: Any, ran: list[int]) -> None:
        own = SkipManager.annotate("rollout", stage="generate", ignore=["ran"])
        reads = own(lambda prompts, sampler, ran: ran.append(sampler.style))
        reads([1], Plain(1.0, style=style, tone=None), ran)

    assert run(loop, "a") == "generated"
    assert "the same dump: sampler.style (None); annotate" in run(loop, None)


class Decaying:
    """A trainer whose temperature decays in the stage, in the loop, or in an object it holds."""

    def __init__(self, where: str, temperature: float) -> None:
        self.where, self.temperature = where, temperature
        self.sampler = Plain(temperature)

    def decay(self, where: str) -> None:
        if self.where == where:
            self.temperature *= 0.9
        if self.where == f"{where}, replaced":
            self.sampler = Plain(self.sampler.temperature * 0.9)

    @SkipManager.annotate("rollout", ignore=["ran"])
    def generate(self, prompts: Any, ran: list[int]) -> None:
        ran.append(1)
        self.decay("stage")


@pytest.mark.parametrize("where", ["stage", "loop", "stage, replaced", "loop, replaced"])
def test_an_attribute_that_decays_is_named_and_not_compared(run: Any, where: str) -> None:
    def loop(steps: range, ran: list[int], temperature: float = 1.0) -> None:
        trainer = Decaying(where, temperature)
        for _ in range(1, steps.start):
            trainer.decay(where.partition(",")[0])
        for step in steps:
            visit(step)
            trainer.generate([step], ran)
            trainer.decay("loop")

    assert run(loop, range(1, 4)) == "generated"
    name = "self.sampler.temperature" if "replaced" in where else "self.temperature"
    assert f"{name} (it changes while stages run)" in run(loop, range(1, 4))
    # From a checkpoint, and on from there.
    assert run(loop, range(3, 4)) != "generated"
    assert run(loop, range(3, 6)) == "generated"
    assert run(loop, range(1, 6)) != "generated"
    edited = run(functools.partial(loop, temperature=0.5), range(1, 4))
    assert "temperature: 0.5 now, 1.0 in" in edited


def test_a_part_of_an_argument_that_the_stage_changes_is_named_and_not_compared(run: Any) -> None:
    def generate(prompts: Any, sampling: Any, drawn: Any, mixed: Any, ran: list[int]) -> None:
        ran.append(1)
        drawn += 1
        mixed["n"] += 1
        sampling["tokens"] = sampling.pop("tokens", 8) + 1

    def loop(temperature: float, ran: list[int]) -> None:
        sampling, drawn, mixed = {"temperature": temperature}, torch.zeros(3), {"f": print, "n": 0}
        for step in (1, 2, 3):
            visit(step)
            annotate(generate)([step], sampling, drawn, mixed, ran)

    assert run(loop, 0.5) == "generated"
    changes = "(it changes while stages run)"
    assert f" drawn {changes}, mixed.n {changes}, sampling.tokens {changes}" in run(loop, 0.5)
    assert "arguments.sampling.temperature: 0.6 now, 0.5 in" in run(loop, 0.6)


def test_what_a_stage_closes_over_may_decay(run: Any) -> None:
    def loop(temperature: float, ran: list[int]) -> None:
        def generate(prompts: Any, ran: list[int]) -> None:
            nonlocal temperature
            ran.append(1)
            temperature *= 0.9

        for step in (1, 2):
            visit(step)
            annotate(generate)([step], ran)

    assert run(loop, 0.5) == "generated"
    assert "temperature (it changes while stages run)" in run(loop, 0.5)
    assert "arguments.temperature: 0.6 now, 0.5 in" in run(loop, 0.6)


def test_other_code_is_said_or_refused(run: Any) -> None:
    def loop(body: str, ran: list[int], usual: str = "[1]") -> None:
        namespace: dict[str, Any] = {}
        exec(f"def generate(prompts, ran, weights={usual}):\n    {body}", namespace)
        own = SkipManager.annotate("rollout", stage="generate", ignore=["ran", "weights"])
        own(namespace["generate"])([1], ran)

    assert run(loop, "ran.append(1)") == "generated"
    assert run(loop, "ran.append(1)  # the same") == ""
    assert run(loop, "ran.append(1)", identity=["code"]) == ""
    for other in (loop, functools.partial(loop, usual="[2]")):
        body = "ran.append(1 + 1)" if other is loop else "ran.append(1)"
        said = run(other, body)
        assert "replayed although the code of generate has changed" in said
        assert "skip.identity=[code] compares it" in said
        assert "code: 'generate, " in run(other, body, identity=["code"])


@pytest.mark.parametrize(
    ("make", "left"),
    [
        (lambda t: Plain(0, a=Plain(0, b=Plain(0, c=Plain(0, d=Plain(t))))), "sampler.a.b.c.d"),
        (lambda t: Plain(0, a=Plain(0, b=Plain(0, c=Plain(t)))), ""),
        (lambda t: Plain(t, **{f"_{i}": None for i in range(256)}), "sampler"),
        (lambda t: Plain(t, **{f"_{i}": None for i in range(255)}), ""),
        (lambda t: [Plain(t), *(Plain(0, a=[Plain(t)] * 200) for _ in range(60))], "sampler."),
    ],
    ids=["four levels", "three levels", "257 fields", "256 fields", "12 000 values"],
)
def test_where_no_look_goes_is_named(run: Any, make: Any, left: str) -> None:
    assert run(own_loop, make(0.5)) == "generated"
    if left:
        assert f" {left}" in run(own_loop, make(0.5))
    else:
        assert "temperature: 0.6 now, 0.5 in the dump" in run(own_loop, make(0.6))
