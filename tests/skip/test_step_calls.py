"""Which dump serves a call where other jobs, damage or a disk that fails have a part in it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlskip import SkipManager
from rlskip.errors import MissError
from rlskip.store import Identity, StepStore

THEIRS = Identity.of({"prompts": "a" * 32})
made: list[str] = []


@pytest.fixture(autouse=True)
def _empty() -> None:
    made.clear()


@SkipManager.annotate(role="rollout", identity=lambda prompts, **given: given)
def generate(prompts: str, **given: int) -> str:
    made.append(prompts)
    return f"{prompts}{len(made)}"


def step(number: int, *calls: str) -> list[str]:
    """One visit of a step."""
    SkipManager.set_step(number + 1)
    SkipManager.set_step(number)
    return [generate(call) for call in calls]


def test_where_a_dump_is_lost_no_first_call_is_a_mismatch(dumped_calls: Any) -> None:
    dumps = dumped_calls({1: "abc"}, on_miss="error")
    (next(dumps.glob("*/*/1")) / "meta.json").unlink()
    SkipManager.set_step(1)
    for prompts in "xy":  # the first, which was refused, does not count
        with pytest.raises(MissError, match="a dump of the step is missing, and the others were"):
            generate(prompts)
    SkipManager.store("rollout").quarantine(1, "for a test")
    with pytest.raises(MissError, match="a dump of the step is missing, and the others were"):
        step(1, "x")


def test_a_dump_without_an_identity_serves_any_call_but_last(init: Callable[..., Path]) -> None:
    init()
    SkipManager.store("rollout").save(1, "unnamed")
    assert step(1, "a") == ["unnamed"]
    assert (step(1, "a", "b"), step(1, "b", "a")) == (["unnamed", "b1"], ["b1", "unnamed"])


def test_a_call_that_cannot_be_compared_costs_no_dump_that_served_another(
    dumped_calls: Any,
) -> None:
    dumps = dumped_calls({1: "a"}, on_mismatch="regenerate")
    assert step(1, "a") == ["a1"]
    generate(object())  # type: ignore[arg-type]
    assert len(made) == 1
    assert not list(dumps.rglob("*.bad-*"))


def test_the_reason_of_a_miss_is_logged(
    dumped_calls: Any, caplog: pytest.LogCaptureFixture
) -> None:
    dumped_calls({1: "a"})
    with caplog.at_level(logging.INFO):
        step(1, "a", "b")
    assert "no dump of the step that is left was made for such a call" in caplog.text


def test_a_dump_that_is_replaced_before_it_is_loaded_is_a_miss(
    dumped_calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumped_calls({1: "a", 2: "b"})
    load, replaced = StepStore.load, []

    def load_later(self: StepStore, number: int, **more: Any) -> Any:
        if not replaced:
            identity = self.read_meta(1).identity
            self.quarantine(1, "for a test")
            replaced.append(self.save(1, "another job's", identity=identity))
        return load(self, number, **more)

    monkeypatch.setattr(StepStore, "load", load_later)
    assert step(1, "a") == ["a1"]
    assert made == ["a"]


@pytest.mark.parametrize("background", [False, True])
def test_a_name_that_another_job_took_meanwhile_stays_its_own(
    init: Callable[..., Path], background: bool
) -> None:
    init(wait_s=0, background_write=background)
    store = SkipManager.store("rollout")

    @SkipManager.annotate(role="rollout")
    def stage(prompts: str) -> str:
        store.save(1, "theirs", identity=THEIRS)
        return prompts

    SkipManager.set_step(1)
    assert stage("ours") == "ours"
    SkipManager.flush()
    first, second = store.in_order(1)
    assert (first, second[-2:]) == ("", "-0")
    assert [store.load(1), store.load(1, call=second)] == ["theirs", "ours"]
    assert step(2) == []
    SkipManager.set_step(1)
    assert stage("ours") == "ours"
