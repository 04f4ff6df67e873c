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
from tensordict import TensorDict

from rlskip.batch.columns import field_names
from rlskip.batch.tables import DataProtoParts
from rlskip.errors import MismatchError
from rlskip.hosts.verl.facts import lacking, without_times
from rlskip.hosts.verl.trainer import begin, rollout_stage
from rlskip.skip.manager import SkipManager

ROLLOUT = {"n": 2, "calculate_log_probs": False, "enable_rollout_routing_replay": False}


def rollouts(*more: str) -> DataProtoParts:
    tensors = {name: torch.zeros(2, 3) for name in ("responses", *more)}
    metrics = [{"generate_sequences": 1.5, "tool_calls": 0.5, "num_preempted": 2}] * 2
    timing = {"agent_loop/slowest/generate_sequences": 1.5}
    return DataProtoParts(
        TensorDict(tensors, batch_size=2),
        {"uid": np.array(["a", "b"], dtype=object)},
        {"timing": timing, "metrics": metrics, "other": 1},
    )


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ({}, []),
        ({"actor_rollout_ref": {"rollout": ROLLOUT}}, []),
        (
            {"actor_rollout_ref": {"rollout": {**ROLLOUT, "calculate_log_probs": True}}},
            ["rollout_log_probs (actor_rollout_ref.rollout.calculate_log_probs=True)"],
        ),
        (
            {"actor_rollout_ref": {"rollout": {**ROLLOUT, "enable_rollout_routing_replay": True}}},
            ["routed_experts (actor_rollout_ref.rollout.enable_rollout_routing_replay=True)"],
        ),
        (
            {"distillation": {"enabled": True}},
            [f"teacher_{what} (distillation.enabled=True)" for what in ("ids", "logprobs")],
        ),
    ],
)
def test_what_a_run_needs(config: Any, fields: list[str]) -> None:
    assert lacking(config, rollouts()) == fields
    names = [field.split()[0] for field in fields]
    assert lacking(config, rollouts(*names)) == []
    assert lacking({}, rollouts(*names)) == []


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
    return lambda **rollout: {
        "skip": {"dump_dir": str(tmp_path), "validation": "replay", "rollout": {"enable": True}},
        "actor_rollout_ref": {"rollout": {**ROLLOUT, **rollout}},
    }


def generate(config: Any, *fields: str, role: str = "rollout") -> Any:
    """A call of a verl stage at step 1 in a run of `config`."""

    async def stage(prompts: Any) -> Any:
        return rollouts(*fields)

    begin(config)
    SkipManager.set_step(1)
    meta = {"validate": role == "rollout_val"}
    prompts = DataProtoParts(None, {"raw_prompt": np.array(["x"], dtype=object)}, meta)
    return asyncio.run(rollout_stage(role)(stage)(prompts))


def test_log_probs_are_needed_where_the_run_trains_on_them(config: Any) -> None:
    """tests/skip/test_needed_fields.py has what becomes of a dump that lacks something."""
    needs = config(calculate_log_probs=True)
    for role in ("rollout", "rollout_val"):
        generate(config(), role=role)
    with pytest.raises(MismatchError, match=r"rollout_log_probs \(actor_rollout_ref\.rollout\.cal"):
        generate(needs, "rollout_log_probs")
    replayed = generate(needs, "rollout_log_probs", role="rollout_val")
    assert "rollout_log_probs" not in field_names(replayed)


def test_log_probs_that_nobody_needs_are_no_mismatch(config: Any) -> None:
    generate(config(calculate_log_probs=True), "rollout_log_probs")
    replayed = generate(config())
    assert replayed.meta_info["timing"] == {}
    assert "rollout_log_probs" in field_names(replayed)
