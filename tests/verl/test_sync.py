"""verl 0.8's ``main_ppo_sync``: A (seed 1) dumps, B (seed 2) has A's dumps."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.verl, pytest.mark.timeout(1800)]

STEPS, PROMPTS, N = 2, 4, 2
SESSIONS = STEPS * PROMPTS * N
MAIN = "verl.trainer.main_ppo_sync"
# Validation before training and shuffled data, in every run alike.
ALL = ("data.shuffle=True", "trainer.val_before_train=True", "trainer.experiment_name=mine")
ON = ("+skip=rollout_tq_cache", "skip.steps=[1,2]")


@pytest.fixture(scope="module")
def a(verl080: Any) -> Any:
    more = ("skip.dump_dir=dumps", "trainer.save_freq=1")
    return verl080.train("sync_a", "legacy", *ALL, *ON, *more, MAIN=MAIN)


@pytest.fixture(scope="module")
def b(verl080: Any, a: Any) -> Any:
    """With dropped scores, which verl's reward workers compute again, with the same result."""
    on = (*ON, f"skip.dump_dir={a.folder}/dumps", "skip.on_miss=error")
    drop = "skip.drop_fields=[rm_scores]"
    return verl080.train("sync_b", "legacy", *ALL, *on, drop, seed=2, MAIN=MAIN)


@pytest.mark.long
def test_the_first_run_dumps_each_step(a: Any) -> None:
    assert (a.summary["rollout_tq"]["hits"], a.summary["rollout_tq"]["misses"]) == (0, STEPS)
    where = a.folder / "dumps/mine_verlcpu/GBS4_N2_in64_out16"
    assert sorted(str(f.relative_to(where)) for f in where.glob("*/0/gen_batch.dp")) == [
        "1/0/gen_batch.dp",
        "2/0/gen_batch.dp",
    ]


@pytest.mark.long
def test_the_second_run_replays_to_the_last_bit(a: Any, b: Any) -> None:
    assert len(a.grad_norms) == STEPS
    assert b.grad_norms == a.grad_norms
    assert b.generated == a.generated - SESSIONS > 0, "validation is generated"
    assert b.summary["rollout_tq"]["hits"] == STEPS


@pytest.mark.long
def test_without_dumps_the_second_seed_gives_other_rollouts(verl080: Any, a: Any) -> None:
    c = verl080.train("sync_c", "legacy", *ALL, seed=2, MAIN=MAIN)
    assert c.generated == a.generated
    assert float(c.grad_norms[0]) != pytest.approx(float(a.grad_norms[0]), rel=1e-3)


@pytest.mark.long
def test_a_resumed_run_replays_what_is_left(verl080: Any, a: Any) -> None:
    on = (*ON, f"skip.dump_dir={a.folder}/dumps", "skip.on_miss=error", *a.resume_after(1))
    run = verl080.train("sync_resumed", "legacy", *ALL, *on, seed=2, MAIN=MAIN)
    assert run.generated == a.generated - SESSIONS
    assert run.grad_norms == a.grad_norms[1:]


def test_a_role_that_it_never_calls_is_refused_before_ray(verl080: Any) -> None:
    run = verl080.train("sync_no", "legacy", "+skip=rollout_cache", MAIN=MAIN, fails=True)
    assert "main_ppo_sync never calls a stage 'rollout'" in run.output
    assert not run.started_ray
