"""verl's genuine trainers record without a line of the user's; a planted bug is named at its stage.

A records and dumps, with a critic, a reference policy and the engine's log-probs; the others replay
its rollouts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import pytest

import rlskip as package

pytestmark = [pytest.mark.verl, pytest.mark.timeout(2400)]

HERE = Path(__file__).parent
MODULES = "verlcpu,planted"
ACTOR, CRITIC, REF = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.ref"
MODEL = ("critic.fsdp", f"{REF}.fsdp_config")
PPO = (
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=True",
    "algorithm.kl_ctrl.kl_coef=0.1",
    "actor_rollout_ref.rollout.calculate_log_probs=True",
    f"{ACTOR}.ppo_epochs=2",
    f"{REF}.log_prob_micro_batch_size_per_gpu=4",
    f"{REF}.strategy=fsdp2",
    "critic.strategy=fsdp2",
    "critic.ppo_micro_batch_size_per_gpu=4",
    "critic.model.use_remove_padding=False",
    "critic.model.enable_gradient_checkpointing=False",
    "+critic.model.override_config.attn_implementation=eager",
    *(f"{node}.strategy=fsdp2" for node in MODEL),
    *(f"{node}.use_torch_compile=False" for node in MODEL),
    *(f"{node}.model_dtype=fp32" for node in MODEL),
    *(f"+{node}.mixed_precision.param_dtype=fp32" for node in MODEL),
)


def train(
    verl: Any, name: str, mode: str, dumps: str, *more: str,
    option: str = "rollout_cache", bug: str = "", seed: int = 1,
) -> Path:  # fmt: skip
    """The Hydra output directory of a run that records, and replays what `dumps` has."""
    option = "rollout_tq_cache" if mode == "v1" else option
    model = f"critic.model.path={verl.ray}/assets/model"
    on = ("+record=stages", "trainer.experiment_name=stages", f"+skip={option}",
          f"skip.dump_dir={dumps}", "skip.steps=[1,2]", *PPO, model, *more)  # fmt: skip
    env = {"PLANTED": bug, "VERL_USE_EXTERNAL_MODULES": MODULES, "PYTHONPATH": str(HERE)}
    return Path(verl.train(name, mode, *on, seed=seed, **env).folder) / "hydra"


@pytest.fixture(scope="module")
def dumps(verl091: Any) -> str:
    return str(verl091.folder / "dumps_of_stages")


@pytest.fixture(scope="module")
def golden(verl091: Any, dumps: str) -> Path:
    return train(verl091, "golden", "v0", dumps)


ALL = {"engine_log_probs", "old_log_probs", "ref_log_probs", "values", "scores", "rewards",
       "advantages", "returns"}  # fmt: skip


def test_v0_records_each_stage_and_its_repetition_is_equal(
    verl091: Any, golden: Path, dumps: str, rlskip: Any
) -> None:
    answer = rlskip("compare", golden, train(verl091, "again", "v0", dumps), "--json")
    assert answer.code == 0, answer.out
    assert {one["state"] for step in answer.json["steps"] for one in step["stages"]} == {"equal"}
    names = [one["stage"] for one in answer.json["steps"][0]["stages"]]
    assert names[:2] == ["rollouts", "mask"]
    assert {*ALL, "metrics.actor/grad_norm", "metrics.actor/pg_loss",
            "metrics.actor/reward_kl_penalty", "metrics.critic/vf_loss"} <= set(names)  # fmt: skip
    assert not [name for name in names if "timing" in name or "perf/" in name]


@attrs.frozen
class Change:
    """A planted bug or overrides, and the stage and step at which it shows."""

    stage: str
    step: int = 1
    bug: str = ""
    overrides: tuple[str, ...] = ()
    has_token: bool = True


# The first of the actor's metrics, in the order in which verl logs them.
CLIPPED = "metrics.actor/pg_clipfrac"
CLIP = (f"{ACTOR}.clip_ratio_low=0.001", f"{ACTOR}.clip_ratio_high=0.001")
CHANGES = {
    "the response mask is shifted by one": Change("mask", bug="mask"),
    "advantages over the wrong denominator": Change("advantages", bug="advantages"),
    # Before the first update the policy is its own reference.
    "KL of the wrong sign": Change("rewards", 2, bug="kl_sign"),
    "one NaN in one row": Change("values", bug="nan"),
    "another clip ratio": Change(CLIPPED, overrides=CLIP, has_token=False),
    "another learning rate": Change(
        CLIPPED, overrides=(f"{ACTOR}.optim.lr=2e-3",), has_token=False
    ),
    "bfloat16 for float32": Change(
        "old_log_probs", overrides=(f"++{ACTOR}.fsdp_config.mixed_precision.param_dtype=bf16",)
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CHANGES)
def test_v0_a_change_is_named_at_its_stage(
    verl091: Any, golden: Path, dumps: str, rlskip: Any, name: str
) -> None:
    change = CHANGES[name]
    other = train(verl091, "changed", "v0", dumps, *change.overrides, bug=change.bug)
    answer = rlskip("compare", golden, other, "--json")
    assert answer.code == 1
    first = answer.json["first"]
    assert (first["stage"], first["step"]) == (change.stage, change.step), answer.json["verdict"]
    assert (first["at"]["row"] is not None) is change.has_token
    assert (first["at"]["token"] is not None) is change.has_token
    if change.bug == "nan":
        assert (first["off"], first["at"]["b"]) == (1, None)


def states(answer: Any) -> dict[str, str]:
    """The state of each stage of step 1 but metrics."""
    found = answer.json["steps"][0]["stages"]
    return {one["stage"]: one["state"] for one in found if not one["stage"].startswith("metrics")}


def differing_metrics(answer: Any) -> set[str]:
    """Those that differ beyond rounding at step 1."""
    stages = answer.json["steps"][0]["stages"]
    names = {one["stage"] for one in stages if one["state"] == "differs"}
    return {name.removeprefix("metrics.") for name in names}


# verl averages them over micro-batches, not over tokens.
BY_MICRO_BATCH = {"actor/pg_clipfrac", "actor/ppo_kl"}


@pytest.mark.long
def test_micro_batches_of_another_size_differ_by_rounding(
    verl091: Any, golden: Path, dumps: str, rlskip: Any
) -> None:
    sizes = (f"{ACTOR}.ppo_micro_batch_size_per_gpu=2", "critic.ppo_micro_batch_size_per_gpu=2",
             "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
             f"{REF}.log_prob_micro_batch_size_per_gpu=2")  # fmt: skip
    other = train(verl091, "micro", "v0", dumps, *sizes)
    answer = rlskip("compare", golden, other, "--json")
    found = states(answer)
    assert set(found.values()) <= {"equal", "within rounding"}
    assert differing_metrics(answer) == BY_MICRO_BATCH


@pytest.mark.long
def test_v1_records_the_same_stages_as_v0(verl091: Any, golden: Path, rlskip: Any) -> None:
    """Its dumps are others; the token server samples the same for the same weights."""
    folder = str(verl091.folder / "dumps_of_v1_stages")
    one, again = (train(verl091, name, "v1", folder) for name in ("v1_one", "v1_again"))
    answer = rlskip("compare", one, again, "--json")
    assert answer.code == 0, answer.out
    answer = rlskip("compare", golden, one, "--json", "--steps", "1")
    found = states(answer)
    assert {"rollouts", *ALL} <= found.keys()
    assert set(found.values()) <= {"equal", "within rounding"}
    # Its micro-batches have the order in which rows arrive; a mean of about 0; and a share of the
    # prompts that are as wide as the batch, which V1 pads less.
    others = {"critic/advantages/mean", "prompt_length/clip_ratio"}
    assert differing_metrics(answer) <= BY_MICRO_BATCH | others


@pytest.mark.parametrize("mode", ["v0", "v1"])
def test_a_bundle_of_grpo_has_equal_advantages_and_its_loss(
    verl091: Any, tmp_path: Path, rlskip: Any, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumps = str(verl091.folder / f"dumps_of_grpo_{mode}")
    more = ("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=False",
            f"{ACTOR}.ppo_epochs=1")  # fmt: skip
    output = train(verl091, f"grpo_{mode}", mode, dumps, *more)
    out = tmp_path / "step.bundle"
    (run,) = (one for one in package.open(dumps) if one.steps())
    bundled = rlskip("bundle", run.directory, 1, "-o", out, "--records", output)
    assert bundled.code == 0, bundled.err
    stages = ("--advantages", "grpo", "--loss", "grpo", "--json")
    advantages, loss = rlskip("bundle", "--replay", out, *stages).json["stages"]
    assert advantages["state"] == "equal", advantages
    assert loss["state"] in ("equal", "within rounding"), loss
    if mode == "v1":
        monkeypatch.chdir(tmp_path)
        trains_on_given_completions(verl091, dumps, more, rlskip)


def trains_on_given_completions(verl: Any, dumps: str, more: tuple[str, ...], rlskip: Any) -> None:
    """As docs/recipes.md makes them of a run's dumps, here in the working directory."""
    page = (HERE.parents[1] / "docs" / "recipes.md").read_text(encoding="utf-8")
    _, _, recipe = page.partition("<!-- needs: verl -->")
    (program,) = re.findall(r"(?ms)^```python\n(.*?)^```", recipe)
    Path("dumps").symlink_to(dumps)
    names = {"completion": lambda prompt: [*prompt[-3:], 65, 66]}
    exec(f"from pathlib import Path\nimport rlskip, torch\n{program}", names)
    on = (*more, "skip.on_miss=error", "skip.drop_fields=[rm_scores]",
          "actor_rollout_ref.rollout.calculate_log_probs=False")  # fmt: skip
    output = train(verl, "given", "v1", str(Path("given").absolute()), *on, seed=2)
    generated = [one for one in (output.parent / "server.jsonl").read_text().splitlines()
                 if '"generate"' in one]  # fmt: skip
    assert generated == []
    (run,) = (one for one in package.open("given") if one.steps())
    assert {len(row["response"]) for row in run.iter_rows(["response"])} == {5}
    steps = rlskip("compare", output, output, "--json").json["steps"]
    assert [one["step"] for one in steps] == [1, 2], "both are trained on"
    assert {"scores", "advantages"} <= {one["stage"] for one in steps[0]["stages"]}
