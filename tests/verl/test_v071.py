"""verl 0.7.1's `main_ppo`: A (seed 1) dumps, B (seed 2) has A's dumps.

All runs train by ReMax, which generates twice a step, on shuffled data and after a validation.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.verl, pytest.mark.long, pytest.mark.timeout(1800)]

STEPS, PROMPTS, N = 2, 4, 2
SESSIONS = STEPS * PROMPTS * (N + 1)
HERE = Path(__file__).parent
ALL = (
    "algorithm.adv_estimator=remax",
    "data.shuffle=True",
    "trainer.val_before_train=True",
    "trainer.experiment_name=mine",
    f"reward.custom_reward_function.path={HERE / 'remax071.py'}",
)
ON = ("+skip=rollout_cache", "skip.steps=[1,2]", "skip.on_miss=error")
WITH = {"VERLCPU_EXTRA_MODULES": "remax071", "PYTHONPATH": str(HERE)}


@pytest.fixture(scope="module")
def train(verl071: Any) -> Callable[..., Any]:
    """``train(name, *overrides, seed=1)``: a run of `main_ppo`."""
    return lambda name, *overrides, **more: verl071.train(
        name, "legacy", *ALL, *overrides, **WITH, **more
    )


@pytest.fixture(scope="module")
def a(train: Callable[..., Any]) -> Any:
    more = ("skip.on_miss=generate", "skip.dump_dir=dumps", "trainer.save_freq=1")
    return train("a", *ON, *more)


@pytest.fixture(scope="module")
def b(train: Callable[..., Any], a: Any) -> Any:
    """With dropped scores, which verl's reward workers compute again, with the same result."""
    more = (f"skip.dump_dir={a.folder}/dumps", "skip.drop_fields=[rm_scores]")
    rewarded = str(a.folder / "rewarded")
    return train("b", *ON, *more, seed=2, REWARDED=rewarded)


def test_each_call_of_a_step_is_dumped(a: Any) -> None:
    where = a.folder / "dumps/mine_verlcpu/GBS4_N2_in64_out16"
    found = sorted(str(file.parent.relative_to(where)) for file in where.rglob("gen_batch.dp"))
    assert found == ["1", "1/1", "2", "2/1"]


def test_the_second_run_replays_to_the_last_bit(a: Any, b: Any) -> None:
    assert len(a.grad_norms) == STEPS
    assert b.grad_norms == a.grad_norms
    assert b.generated == a.generated - SESSIONS > 0, "validation is generated"
    assert (b.summary["rollout"]["hits"], b.summary["rollout"]["misses"]) == (2 * STEPS, 0)


def test_dropped_scores_are_computed_again(a: Any, b: Any) -> None:
    assert (a.folder / "rewarded").read_text().split().count("train") == SESSIONS
    assert b.scores == a.scores


def test_a_resumed_run_replays_the_steps_that_are_left(train: Callable[..., Any], a: Any) -> None:
    on = (*ON, f"skip.dump_dir={a.folder}/dumps", *a.resume_after(1))
    run = train("resumed", *on, seed=2)
    assert run.grad_norms == a.grad_norms[1:]
    assert run.generated == a.generated - SESSIONS


def test_an_engine_is_always_started(verl071: Any) -> None:
    on = ("+skip=rollout_replay", "skip.steps=[1,2]")
    run = verl071.train("engine071", "legacy", *on, fails=True)
    assert "this release of verl always starts its engine" in run.output
    assert not run.started_ray
