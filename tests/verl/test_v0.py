"""verl's V0 trainer, `python -m verl.trainer.main_ppo`: one flag, and no train generation.

A (seed 1) dumps, B (seed 2) has A's dumps, C (seed 2) has none: B's gradient norms equal A's to the
last bit, C's do not. C runs verl's own skip without rlskip. A run takes most of a minute, so each
serves several tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.verl, pytest.mark.timeout(1800)]

STEPS, PROMPTS, N = 2, 4, 2
SESSIONS = STEPS * PROMPTS * N

# Validation before training and shuffled data, in every run alike.
ALL = (
    "data.shuffle=True",
    "trainer.val_before_train=True",
    "trainer.experiment_name=mine",
    "actor_rollout_ref.rollout.calculate_log_probs=False",
)
WHERE = "dumps/mine_verlcpu/GBS4_N2_in64_out16"
LOGGED = f"reward.custom_reward_function.path={Path(__file__).with_name('reward.py')}"
SEEN = "trainer.logger=[console,tensorboard]"
ON = ("+skip=rollout_cache", "skip.steps=[1,2]")


@pytest.fixture(scope="module")
def a(verl091: Any) -> Any:
    on = (*ON, "skip.dump_dir=dumps", SEEN)
    board = f"{verl091.folder}/board/a"
    return verl091.train("a", "v0", "trainer.use_v1=False", *ALL, *on, TENSORBOARD_DIR=board)


@pytest.fixture(scope="module")
def b(verl091: Any, a: Any) -> Any:
    """No option, hence no callback: verl's own leaves, and keys that verl does not have."""
    on = (
        "++skip.rollout.enable=True", "++skip.rollout.steps=[1,2]",
        f"++skip.rollout.dump_dir={a.folder}/dumps", "++skip.on_miss=error",
        "++skip.drop_fields=[rm_scores]", "++skip.gbs=4", "++skip.rollout.n=2",
    )  # fmt: skip
    env = {"REWARDED": f"{verl091.folder}/rewarded", "TENSORBOARD_DIR": f"{verl091.folder}/board/b"}
    return verl091.train("b", "v0", *ALL, *on, LOGGED, SEEN, seed=2, **env)


@pytest.fixture(scope="module")
def c(verl091: Any) -> Any:
    theirs = [f"skip.rollout.{key}" for key in ("enable=True", "steps=[1,2]", "dump_dir=theirs")]
    return verl091.train("c", "v0", *ALL, *theirs, seed=2, VERL_USE_EXTERNAL_PLUGINS="none")


def test_the_first_run_dumps_and_counts(a: Any, c: Any) -> None:
    for step in (1, 2):
        files = (a.folder / WHERE / str(step)).iterdir()
        assert sorted(file.name for file in files) == ["gen_batch.dp", "meta.json"]
    assert a.generated == c.generated > SESSIONS, "as many as without rlskip"
    counts = a.summary["rollout"]
    assert (counts["hits"], counts["misses"]) == (0, STEPS)
    assert counts["bytes_written"] > 0


def test_the_second_run_replays_to_the_last_bit(a: Any, b: Any, c: Any) -> None:
    assert len(a.grad_norms) == STEPS
    assert b.grad_norms == a.grad_norms
    assert c.grad_norms != a.grad_norms
    assert b.generated == c.generated - SESSIONS > 0, "validation is never skipped"
    assert a.output.count("timing_s/agent_loop/slowest/generate_sequences:") == STEPS
    assert "timing_s/agent_loop" not in b.output, "no times of the first run"
    assert b.output.count("timing_s/gen:") == STEPS
    verls = "[RolloutSkip()]"  # its own manager and ours never both act
    assert verls not in a.output + b.output
    assert verls in c.output
    assert "rlskip:" not in c.output


@pytest.mark.usefixtures("a", "b")
def test_tensorboard_shows_that_a_run_is_replayed(verl091: Any, scalars: Any) -> None:
    first, second = (scalars(verl091.python, verl091.folder / "board" / name) for name in "ab")
    assert first["rlskip/replayed"] == [0.0] * STEPS
    assert second["rlskip/replayed"] == [1.0] * STEPS
    assert second["rlskip/off_policy"] == [0.0] * STEPS
    assert min(second["rlskip/seconds_saved"]) > 0
    assert first["actor/grad_norm"] == second["actor/grad_norm"]


def test_dropped_scores_are_computed_again(verl091: Any, b: Any) -> None:
    lines = [line.split() for line in (verl091.folder / "rewarded").read_text().splitlines()]
    assert [split for split, _ in lines].count("train") == SESSIONS
    # A replayed session is scored with what verl itself tells of one that it has just sampled.
    told = dict(lines)
    assert told["train"] == told["test"]
    assert "tool_rewards" in told["train"]
    assert "scores are replayed" not in b.output
