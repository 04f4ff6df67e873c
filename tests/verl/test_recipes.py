"""Trainers that generate several times a step, on verl's genuine RayPPOTrainer (V0).

A (seed 1) dumps, B (seed 2) has A's dumps, generates nothing and has A's rollouts or gradient norms
to the last bit.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.verl, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
BATCH, N = 4, 2
# Of each batch of four questions two have answers whose rewards differ: two calls fill a batch.
HALF = "2:0"
TIES = f"reward.custom_reward_function.path={HERE / 'ties.py'}"


def files(run: Any) -> list[str]:
    """The step of each of its dumps, with the directory of a role of its own before it."""
    found = (run.folder / "dumps").rglob("gen_batch.dp")
    paths = ("/".join(file.relative_to(run.folder / "dumps").parts[2:-1]) for file in found)
    return sorted(path.partition(".")[0] for path in paths)


def test_each_call_of_a_step_is_dumped_and_replayed(verl091: Any) -> None:
    env = {"MAIN": "two_calls", "PYTHONPATH": str(HERE)}
    on = ("v0", "+skip=rollout_cache", "skip.steps=[1,2]")
    a = verl091.train("a", *on, "skip.dump_dir=dumps", **env)
    b = verl091.train(
        "b", *on, f"skip.dump_dir={a.folder}/dumps", "skip.on_miss=error", seed=2, **env
    )
    assert (a.generated, b.generated) == (2 * 2 * BATCH * N, 0)
    assert files(a) == ["1", "1", "2", "2"]
    said = [re.findall(r"rollouts of step \d: .*", run.output) for run in (a, b)]
    assert len({*said[0]}) == 4
    assert said[0] == said[1]
    assert (b.summary["rollout"]["hits"], b.summary["rollout"]["misses"]) == (4, 0)


@pytest.mark.long
def test_remax_replays_its_greedy_baselines(verl091: Any) -> None:
    remax = ("v0", "algorithm.adv_estimator=remax", "+skip=rollout_cache", "skip.steps=[1,2]")
    a = verl091.train("a", *remax, "skip.dump_dir=dumps")
    assert a.generated == 2 * BATCH * (N + 1)
    replay = (f"skip.dump_dir={a.folder}/dumps", "skip.on_miss=error")
    b = verl091.train("b", *remax, *replay, seed=2)
    assert b.generated == 0
    assert b.grad_norms == a.grad_norms
    assert len(a.grad_norms) == 2


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH that has verl-recipe as `recipe`, the name it imports itself by."""
    checkout = os.environ.get("RLSKIP_VERL_RECIPES")
    if not checkout:
        pytest.skip("RLSKIP_VERL_RECIPES names no checkout of github.com/verl-project/verl-recipe")
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "recipe").symlink_to(Path(checkout).absolute())
    return folder


@pytest.mark.long
def test_the_dapo_of_verls_recipes_replays(verl091: Any, recipes: Path) -> None:
    dapo = (
        "hydra.searchpath=[pkg://verl.trainer.config]",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=seq_reward",
        # The loader has four batches, of which the filter makes two steps.
        *("trainer.total_training_steps=null", "trainer.total_epochs=1"),
        f"data.train_max_samples={4 * BATCH}",
        # verl's default, which the recipe ignores.
        "trainer.use_v1=True",
        *("trainer.val_before_train=True", "trainer.test_freq=1"),
        *("data.val_batch_size=1", "data.val_max_samples=1", "skip.validation=replay"),
        "skip.steps=[1,2]",
    )
    where = {"PYTHONPATH": str(recipes / "recipe"), "MAIN": "dapo.main_dapo"}
    a = verl091.train(
        "a", "v0", *dapo, TIES, "+skip=rollout_cache", "skip.dump_dir=dumps", DIFFER=HALF, **where
    )
    assert a.generated == 2 * 2 * BATCH * N + 3
    trained = [file for file in files(a) if "rollout_val" not in file]
    assert trained == ["1", "1", "2", "2"]
    replay = ("+skip=rollout_replay", f"skip.dump_dir={a.folder}/dumps")
    b = verl091.train(
        "b", "v0", *dapo, TIES, *replay, "skip.match=step", seed=2, DIFFER=HALF, **where
    )
    assert b.generated == 0
    assert b.grad_norms == a.grad_norms
    assert len(a.grad_norms) == 2
    # Another reward keeps more groups, so that step 3 takes a batch of the dumps' step 2.
    again = ("+skip=rollout_cache", f"skip.dump_dir={a.folder}/dumps", "skip.steps=all")
    c = verl091.train("c", "v0", *dapo, *again, "skip.drop_fields=[rm_scores]", seed=2, **where)
    assert len(c.grad_norms) == 3
    assert (c.summary["rollout"]["hits"], c.summary["rollout"]["misses"]) == (4, 0)
    assert c.generated == 1, "validation after step 3"
