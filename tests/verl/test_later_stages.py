"""Roles `ref` and `reward` of verl: A (seed 1) dumps, B (seed 2) replays and computes neither."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import pytest

pytestmark = [pytest.mark.verl, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
ROLES = ("skip.ref.enable=true", "skip.steps=all")
REF = (
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.ref.fsdp_config.strategy=fsdp2",
    "actor_rollout_ref.ref.fsdp_config.use_torch_compile=False",
    "+actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype=fp32",
)
KL = ("actor_rollout_ref.actor.use_kl_loss=True", *REF)
SCORED = f"reward.custom_reward_function.path={HERE / 'reward.py'}"
VALIDATES = (
    "skip.validation=replay", "trainer.val_before_train=True", "trainer.test_freq=1",
    "data.val_max_samples=2",
)  # fmt: skip
JUDGE = (
    "skip.reward.enable=true", "reward.reward_model.enable=True",
    "reward.reward_model.rollout.name=vllm",
    "reward.reward_model.rollout.tensor_model_parallel_size=1",
)  # fmt: skip
# The servers of the tests take whole weights, so the adapter is merged into them.
LORA = (
    "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=all-linear",
    "actor_rollout_ref.model.lora.merge=True",
    "actor_rollout_ref.actor.fsdp_config.full_determinism=True",  # seeds the adapter
)  # fmt: skip
_VALIDATED = re.compile(r"(val-(?:core|aux)/\S+?):(\S+)")


@attrs.frozen
class Noted:
    """A run, and what it started and computed."""

    run: Any
    notes: list[str]
    scored: int


def train(verl: Any, name: str, mode: str, *overrides: str, **more: Any) -> Noted:
    notes, scored = (verl.folder / f"{name}-{kind}" for kind in ("notes", "scored"))
    env = {"NOTES": str(notes), "REWARDED": str(scored), "VERLCPU_EXTRA_MODULES": "judge"}
    env["JUDGE"] = "vllm"  # the only server that verl asks in a way known here
    run = verl.train(
        name, mode, SCORED, "trainer.experiment_name=later",
        f"reward.reward_model.model_path={verl.ray}/assets/model", *ROLES, *overrides,
        PYTHONPATH=str(HERE), **env, **more,
    )  # fmt: skip
    lines = [f.read_text().splitlines() if f.exists() else [] for f in (notes, scored)]
    return Noted(run, lines[0], len(lines[1]))


def counts(noted: Noted, role: str) -> tuple[int, int]:
    found = noted.run.summary[role]
    return found["hits"], found["misses"]


@pytest.mark.parametrize(
    ("mode", "role"), [("v0", "rollout"), pytest.param("v1", "rollout_tq", marks=pytest.mark.long)]
)
def test_a_replay_needs_neither_engine_nor_reference_nor_judge(
    verl091: Any, mode: str, role: str
) -> None:
    on, scored = (*KL, *VALIDATES, *JUDGE), 5  # 2 steps, 3 validations
    if mode == "v1":
        # Its stage has no fields for a reward function, and after a validation that such a judge
        # has scored verl does not know the step of its weights.
        on, scored = (*KL, *JUDGE, "reward.custom_reward_function.path=null"), 2
    a = train(verl091, f"{mode}-a", mode, f"+skip={role}_cache", "skip.dump_dir=dumps", *on)
    assert len(a.run.grad_norms) == 2
    assert a.notes.count("computes reference log-probs") == 2
    assert ("judges" in a.notes) is (mode == "v1")
    assert (counts(a, "ref"), counts(a, "reward")) == ((0, 2), (0, scored))

    dumps = f"skip.dump_dir={a.run.folder}/dumps"
    replay = (*on, f"+skip={role}_replay", dumps, "actor_rollout_ref.rollout.name=vllm")
    b = train(verl091, f"{mode}-b", mode, *replay, seed=2)
    assert b.run.grad_norms == a.run.grad_norms
    assert _VALIDATED.findall(b.run.output) == _VALIDATED.findall(a.run.output)
    assert not {"computes reference log-probs", "judges"} & {*b.notes}
    assert b.scored == b.run.generated == 0
    assert (counts(b, "ref"), counts(b, "reward")) == ((2, 0), (scored, 0))


@pytest.mark.long
def test_the_actor_without_its_adapter_is_a_reference(verl091: Any) -> None:
    on = ("algorithm.use_kl_in_reward=True", *REF, *LORA, "skip.dump_dir=dumps")
    a = train(verl091, "lora-a", "v0", "+skip=rollout_cache", *on)
    b = train(
        verl091, "lora-b", "v0", "+skip=rollout_replay", *on[:-1],
        f"skip.dump_dir={a.run.folder}/dumps", seed=2,
    )  # fmt: skip
    assert b.run.grad_norms == a.run.grad_norms
    assert len(a.run.grad_norms) == 2
    assert counts(b, "ref") == (2, 0)
