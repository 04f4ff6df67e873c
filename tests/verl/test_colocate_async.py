"""verl 0.9's V1 trainer in its mode colocate_async, which generates a batch ahead of training.

A (seed 1) dumps, B (seed 2) has A's dumps, C (seed 2) has none.
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.verl, pytest.mark.long, pytest.mark.timeout(1800)]

STEPS, PROMPTS, N = 3, 4, 2
SESSIONS = STEPS * PROMPTS * N
MODE = {"V1_MODE": "colocate_async"}
# Shuffled data, in every run alike.
ALL = ("data.shuffle=True", "trainer.experiment_name=mine")
ON = ("+skip=rollout_tq_cache", "skip.steps=[1,2,3]")


@pytest.fixture(scope="module")
def a(verl091: Any) -> Any:
    on = (*ON, "skip.dump_dir=dumps", "trainer.save_freq=1")
    run = verl091.train("ahead_a", "v1", *ALL, *on, steps=STEPS, **MODE)
    assert run.generated >= SESSIONS
    assert len(run.grad_norms) == STEPS
    return run


def replay(verl091: Any, a: Any, name: str, *more: str) -> Any:
    on = (*ON, f"skip.dump_dir={a.folder}/dumps", "skip.on_miss=error", *more)
    return verl091.train(name, "v1", *ALL, *on, seed=2, steps=STEPS, **MODE)


def test_the_second_run_replays_to_the_last_bit(verl091: Any, a: Any) -> None:
    b = replay(verl091, a, "ahead_b")
    assert b.generated == 0
    assert b.grad_norms == a.grad_norms
    assert (b.summary["rollout_tq"]["hits"], b.summary["rollout_tq"]["misses"]) == (STEPS, 0)


def test_without_dumps_the_second_seed_gives_other_rollouts(verl091: Any, a: Any) -> None:
    c = verl091.train("ahead_c", "v1", *ALL, seed=2, steps=STEPS, **MODE)
    assert c.generated >= SESSIONS
    assert float(c.grad_norms[0]) != pytest.approx(float(a.grad_norms[0]), rel=1e-3)


def test_a_new_reward_function_scores_the_same_rollouts(verl091: Any, a: Any) -> None:
    on = (*ON, f"skip.dump_dir={a.folder}/dumps", "skip.on_miss=error")
    run = verl091.train_by_coin("ahead_coin", "v1", *ALL, *on, seed=2, steps=STEPS, **MODE)
    assert run.generated == 0
    assert run.grad_norms != a.grad_norms


def test_a_resumed_run_replays_what_is_left(verl091: Any, a: Any) -> None:
    run = replay(verl091, a, "ahead_resumed", *a.resume_after(1))
    assert run.generated == 0
    assert run.grad_norms == a.grad_norms[1:]
