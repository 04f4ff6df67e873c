"""Which dump serves a call where other jobs, other steps or damage have a part in it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlskip import SkipManager
from rlskip.errors import MismatchError, MissError
from rlskip.skip.visit import Found, Visit
from rlskip.store import Identity, StepStore

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


def test_a_step_whose_only_dump_is_damaged_is_a_miss_like_any_other(dumped_calls: Any) -> None:
    (dump,) = dumped_calls({1: "a"}, on_miss="error").rglob("gen_batch.dp")
    dump.write_bytes(b"")
    with pytest.raises(MissError, match="step 1 has no usable dump, and"):
        step(1, "a")


def test_a_refused_call_does_not_count(dumped_calls: Any) -> None:
    dumps = dumped_calls({1: "ab"}, on_miss="error")
    (next(dumps.glob("*/*/1")) / "meta.json").unlink()
    SkipManager.set_step(1)
    for prompts in "xy":
        with pytest.raises(MissError, match="a dump of the step is missing"):
            generate(prompts)


def test_the_reason_of_a_miss_is_what_differs_from_the_nearest(
    init: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    init()
    step(1, "a")
    generate("b", top_k=2, min_p=1)
    generate("b", top_k=1, min_p=1)
    init()
    step(1, "a")
    with caplog.at_level(logging.INFO):
        generate("b", top_k=1, min_p=2)
    (reason,) = [r.getMessage() for r in caplog.records if "call 1 is generated" in r.getMessage()]
    assert "min_p" in reason
    assert "top_k" not in reason


def test_what_another_job_adds_meanwhile_is_one_of_the_steps_calls(store: StepStore) -> None:
    visit = Visit(store, 1)
    store.save(1, "another job's")
    visit.look()
    assert not visit.is_empty
    assert visit.kth(0) == Found(1, 0)
    assert visit.next_number() == 1


def test_a_dump_that_served_a_call_before_it_was_read_serves_no_other(store: StepStore) -> None:
    identity = Identity(prompts_hash="a" * 32)
    store.save(1, "x", identity=identity)
    visit = Visit(store, 1)
    visit.take(Found(1, 0))
    assert list(visit.fitting(identity)) == []


def test_what_a_step_generates_is_found_from_other_steps(dumped_calls: Any) -> None:
    dumped_calls({1: "a", 3: "c"}, match="run")
    step(3, *"cq")  # looks into step 1 for `q`
    step(1, *"an")
    made.clear()
    step(3, *"cn")
    assert made == []


def test_a_mismatch_under_match_run_does_not_advise_it(dumped_calls: Any) -> None:
    dumped_calls({1: "a"})
    step(2, "x")
    generate("b", top_k=1)
    SkipManager.flush()
    dumped_calls({}, match="run")
    with pytest.raises(MismatchError) as caught:
        step(1, "b")
    assert "match=run" not in str(caught.value)


def test_a_dump_that_is_replaced_before_it_is_loaded_is_a_miss(
    dumped_calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumped_calls({1: "a", 2: "b"})
    load, replaced = StepStore.load_with_meta, []

    def load_later(self: StepStore, number: int, **more: Any) -> Any:
        if not replaced:
            rollouts, meta = load(self, 2)
            replaced.append(self.save(1, rollouts, identity=meta.identity, replace=True))
        return load(self, number, **more)

    monkeypatch.setattr(StepStore, "load_with_meta", load_later)
    assert step(1, "a") == ["a1"]
    assert made == ["a"]
