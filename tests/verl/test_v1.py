"""verl 0.9's V1 trainer on TransferQueue.

A (seed 1) dumps, B (seed 2) has A's dumps; `failing` (seed 2) has none, runs rollout-level
dispatch on two workers, and one of its agent loops fails at step 2. A run takes most of a minute,
so each serves several tests.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.verl, pytest.mark.timeout(1800)]

STEPS, PROMPTS, N = 2, 4, 2
SESSIONS = STEPS * PROMPTS * N
HERE = Path(__file__).parent

# Validation before training and shuffled data, in every run alike.
ALL = ("data.shuffle=True", "trainer.val_before_train=True", "trainer.experiment_name=mine")
ON = ("+skip=rollout_tq_cache", "skip.steps=[1,2]")
WHERE = "dumps/mine_verlcpu/GBS4_N2_in64_out16"


@pytest.fixture(scope="module")
def a(verl091: Any) -> Any:
    return verl091.train("v1_a", "v1", *ALL, *ON, "skip.dump_dir=dumps")


@pytest.fixture(scope="module")
def b(verl091: Any, a: Any) -> Any:
    """With dropped scores, so that verl's reward workers score again and write a line each."""
    on = (
        *ON, f"skip.dump_dir={a.folder}/dumps", "skip.on_miss=error",
        "skip.drop_fields=[rm_scores]",
        f"reward.custom_reward_function.path={HERE / 'reward.py'}",
    )  # fmt: skip
    rewarded = str(verl091.folder / "v1_rewarded")
    return verl091.train("v1_b", "v1", *ALL, *on, seed=2, REWARDED=rewarded)


@pytest.fixture(scope="module")
def failing(verl091: Any) -> Any:
    loops = verl091.folder / "loops.yaml"
    loops.write_text("- {name: failing, _target_: loops.Failing}\n")
    agent = "actor_rollout_ref.rollout.agent"
    return verl091.train(
        "v1_failing", "v1", *ALL,
        "+trainer.v1.rollout_level_dispatch=true",
        "+trainer.v1.max_concurrent_rollouts_per_worker=1",
        f"{agent}.num_workers=2",
        f"{agent}.agent_loop_config_path={loops}",
        f"{agent}.default_agent_loop=failing",
        seed=2, fails=True, PYTHONPATH=str(HERE), NOTES=str(verl091.folder / "notes"),
    )  # fmt: skip


def test_the_second_run_replays_to_the_last_bit(a: Any, b: Any, failing: Any) -> None:
    assert len(a.grad_norms) == STEPS
    assert b.grad_norms == a.grad_norms
    # B's seed samples other tokens: the difference is larger than one of summation order.
    assert float(failing.grad_norms[0]) != pytest.approx(float(a.grad_norms[0]), rel=1e-3)


def test_what_is_dumped_counted_and_still_computed(verl091: Any, a: Any, b: Any) -> None:
    for step in (1, 2):
        files = (a.folder / WHERE / str(step)).iterdir()
        assert sorted(file.name for file in files) == ["gen_batch.dp", "meta.json"]
    assert "[RolloutTqSkip()]" not in a.output + b.output, "verl's own manager does not act"
    assert not list(a.folder.rglob("tq_batch.pt"))
    first, second = (run.summary["rollout_tq"] for run in (a, b))
    assert (first["hits"], first["misses"]) == (0, STEPS)
    assert (second["hits"], second["misses"]) == (STEPS, 0)
    assert b.generated == a.generated - SESSIONS > 0, "validation"
    # Dropped scores are computed again.
    assert (verl091.folder / "v1_rewarded").read_text().split().count("train") == SESSIONS
    assert "scores are replayed" not in b.output


@pytest.mark.long
def test_dumps_of_rollout_level_dispatch_are_replayed_without_it(verl091: Any) -> None:
    on = (*ON, "skip.dump_dir=dumps", "+dispatch=rollout_level")
    first = verl091.train("v1_sessions", "v1", *ALL, *on)
    on = (*ON, f"skip.dump_dir={first.folder}/dumps", "skip.on_miss=error")
    second = verl091.train("v1_prompts", "v1", *ALL, *on, seed=2)
    assert second.generated == first.generated - SESSIONS
    assert second.grad_norms == first.grad_norms != []


def test_without_the_option_it_is_refused_before_any_model_is_loaded(verl091: Any) -> None:
    """No option, no callback: the trainer's own process refuses."""
    run = verl091.train("v1_leaf", "v1", "skip.rollout.enable=True", fails=True)
    assert "use skip.rollout_tq (+skip=rollout_tq_cache)" in run.output
    assert run.started_ray
    assert "WorkerDict" not in run.output


def test_sessions_of_a_group_spread_over_the_workers(verl091: Any, failing: Any) -> None:
    ran = [json.loads(line) for line in (verl091.folder / "notes").read_text().splitlines()]
    groups = defaultdict(list)
    for session in ran:
        if session["step"] == 1:
            groups[session["uid"]].append(session)
    assert [{s["session"] for s in group} for group in groups.values()] == [{0, 1}] * PROMPTS
    apart = [group for group in groups.values() if len({s["pid"] for s in group}) == 2]
    # How many depends on which worker is free first; a group kept together would give none.
    assert apart, "one session at a time on each of two workers"


def test_a_session_is_tried_again_and_a_failing_agent_loop_is_named(
    verl091: Any, failing: Any
) -> None:
    assert (verl091.folder / "notes.reset").exists()
    assert "is tried again: ConnectionError: connection reset" in failing.output
    assert len(failing.grad_norms) == 1, "step 1 was trained, and step 2 was not"
    assert re.search(
        r"IncompleteRolloutError: partition 'train', step 2: incomplete groups:\n"
        r".*: expected 2, got 1 \(session 1 failed: data: ValueError: the sandbox is gone\)",
        failing.output,
    )


PLAIN = ("v1", "trainer.val_before_train=False", "+skip=rollout_tq_cache")


@pytest.fixture(scope="module")
def two_steps(verl091: Any) -> Any:
    """Eight prompts in two steps."""
    return verl091.train("v1_two_steps", *PLAIN, "skip.dump_dir=dumps")


@pytest.mark.long
def test_with_another_batch_size_each_prompt_has_its_group(verl091: Any, two_steps: Any) -> None:
    smaller = ("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
    replay = ("skip.match=prompt", "skip.on_miss=error", f"skip.dump_dir={two_steps.folder}/dumps")
    again = verl091.train("v1_four_steps", *PLAIN, *smaller, *replay, seed=2, steps=4)
    assert again.generated == two_steps.generated - SESSIONS == 0
    assert again.summary["rollout_tq"]["hits"] == len(again.grad_norms) == 4
    assert sum(again.scores) / 4 == pytest.approx(sum(two_steps.scores) / 2)


@pytest.mark.long
def test_a_step_of_which_some_prompts_have_dumps_generates_the_others(
    verl091: Any, two_steps: Any
) -> None:
    dumps = verl091.folder / "partial_dumps"
    shutil.copytree(two_steps.folder / "dumps", dumps)
    (second,) = dumps.glob("*/*/2")
    shutil.rmtree(second)
    larger = ("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8")
    replay = ("skip.match=prompt", f"skip.dump_dir={dumps}")
    run = verl091.train("v1_partial", *PLAIN, *larger, *replay, seed=2, steps=1)
    assert run.generated == PROMPTS * N == SESSIONS / 2
    assert len(run.grad_norms) == 1
    assert "rlskip/replayed:0.5" in run.output


@pytest.mark.long
def test_filtered_groups_are_dumped_and_filtered_again(verl091: Any) -> None:
    """``algorithm.filter_groups`` (DAPO) replaces them: the reward is a coin, so about a half."""
    filters = (
        "trainer.experiment_name=mine", "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=reward",
        f"reward.custom_reward_function.path={HERE / 'coin.py'}", *ON,
    )  # fmt: skip
    a = verl091.train("filter_a", "v1", *filters, "skip.dump_dir=dumps")
    replay = (f"skip.dump_dir={a.folder}/dumps", "skip.on_miss=error")
    b = verl091.train("filter_b", "v1", *filters, *replay, seed=2)
    for run in (a, b):
        counted = r"filter_groups/evicted_samples:(?:np\.float64\()?([0-9.]+)"
        assert sum(map(float, re.findall(counted, run.output))) > 0
    assert b.generated == 0
    assert len(a.grad_norms) == STEPS
    assert b.grad_norms == a.grad_norms
