"""Fields of verl's rollouts: what a run needs, and the times that a replay forgets."""

from __future__ import annotations

import asyncio
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

from rlskip.batch.columns import field_names
from rlskip.batch.tables import DataProtoParts
from rlskip.errors import MismatchError
from rlskip.hosts.verl.facts import without_times
from rlskip.hosts.verl.trainer import begin, rollout_stage
from rlskip.skip.manager import SkipManager


def rollouts(*more: str) -> DataProtoParts:
    tensors = {name: torch.zeros(2, 3) for name in ("responses", *more)}
    metrics = [{"generate_sequences": 1.5, "tool_calls": 0.5, "num_preempted": 2}] * 2
    timing = {"agent_loop/slowest/generate_sequences": 1.5}
    return DataProtoParts(
        TensorDict(tensors, batch_size=2),
        {"uid": np.array(["a", "b"], dtype=object)},
        {"timing": timing, "metrics": metrics, "other": 1},
    )


def test_times_are_forgotten_and_all_else_is_kept() -> None:
    batch = rollouts()
    without_times(batch)
    assert batch.meta_info == {
        "timing": {},
        "metrics": [{"generate_sequences": 0.0, "tool_calls": 0.0, "num_preempted": 2}] * 2,
        "other": 1,
    }
    bare = DataProtoParts(None, {}, {"other": 1})
    without_times(bare)
    assert bare.meta_info == {"other": 1}


@pytest.fixture
def config(tmp_path: Path, verl_process: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    # Dumps of a DataProto can be read where verl is; this process has its parts only.
    parts = types.SimpleNamespace(DataProto=DataProtoParts)
    monkeypatch.setitem(sys.modules, "verl.protocol", parts)
    skip = {"dump_dir": str(tmp_path), "validation": "replay", "rollout": {"enable": True}}
    return lambda *on: OmegaConf.merge(
        {"skip": skip}, OmegaConf.from_dotlist([f"{key}=true" for key in on])
    )


def generate(config: Any, *fields: str, role: str = "rollout") -> Any:
    """A call of a verl stage at step 1 in a run of `config`."""

    async def stage(prompts: Any) -> Any:
        return rollouts(*fields)

    begin(config)
    SkipManager.set_step(1)
    meta = {"validate": role == "rollout_val"}
    prompts = DataProtoParts(None, {"raw_prompt": np.array(["x"], dtype=object)}, meta)
    return asyncio.run(rollout_stage(role)(stage)(prompts))


NEEDED = {
    "actor_rollout_ref.rollout.calculate_log_probs": ["rollout_log_probs"],
    "actor_rollout_ref.rollout.enable_rollout_routing_replay": ["routed_experts"],
    "distillation.enabled": ["teacher_ids", "teacher_logprobs"],
}


@pytest.mark.parametrize("key", NEEDED)
def test_what_the_run_trains_on_is_needed(config: Any, key: str) -> None:
    """tests/skip/test_needed_fields.py has what becomes of a dump that lacks something."""
    needs, fields = config(key), NEEDED[key]
    for role in ("rollout", "rollout_val"):
        generate(config(), role=role)
    with pytest.raises(MismatchError) as error:
        generate(needs, *fields)
    for field in fields:
        assert f"{field} ({key}=True)" in str(error.value)
    replayed = generate(needs, *fields, role="rollout_val")
    assert field_names(replayed).isdisjoint(fields)


@pytest.mark.parametrize("key", NEEDED)
def test_what_nobody_needs_is_no_mismatch(config: Any, key: str) -> None:
    generate(config(key), *NEEDED[key])
    for again in (config(), config(key)):
        replayed = generate(again)
        assert replayed.meta_info["timing"] == {}
        assert {*NEEDED[key]} <= field_names(replayed)
