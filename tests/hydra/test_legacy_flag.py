"""The skip flag of older versions of verl, beside rlskip."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlskip import RolloutSkipConfig, SkipManager
from rlskip.config.facts import LEGACY_FLAG as FLAG
from rlskip.config.facts import LegacyFlagWarning

YAML = """
actor_rollout_ref:
  rollout:
    skip: {enable: false, dump_dir: "~/.verl/rollout_dump"}
"""
SHOW = """
print("the task sees", cfg.actor_rollout_ref.rollout.skip.enable)
train(cfg)
"""


@pytest.mark.slow
def test_a_job_turns_the_flag_off_for_the_task_or_refuses(make_app: Callable[..., Any]) -> None:
    app = make_app(config=YAML, task=SHOW)
    # In a multirun the task would see the override.
    run = app.run("-m", "+skip=rollout_cache", "skip.dump_dir=dumps", f"{FLAG}=True", fails=True)
    assert f"add the override {FLAG}=False" in run.err
    assert app.generated == []
    # What an override interpolates has another place in the list of overrides, and the values of
    # `hydra:` are there when the job starts.
    more = ("+b=${hydra:job.name}", "+c=${.b}", "skip.dump_dir=${hydra:runtime.output_dir}/dumps")
    run = app.run("+skip=rollout_cache", *more, f"{FLAG}=True")
    assert "the task sees False" in run.out
    assert f"LegacyFlagWarning: {FLAG} and skip.rollout.enable are both true" in run.err
    assert "role rollout: 0 hits, 2 misses" in run.out


@pytest.mark.parametrize("kind", ["dict", "dataclass", "struct", "read-only"])
def test_init_turns_the_flag_off(kind: str, tmp_path: Path) -> None:
    config: Any = {
        "skip": {"rollout": {"enable": True}, "dump_dir": str(tmp_path)},
        "actor_rollout_ref": {"rollout": {"skip": {"enable": True}}},
    }
    if kind == "dataclass":
        config["actor_rollout_ref"]["rollout"]["skip"] = RolloutSkipConfig(enable=True)
    elif kind != "dict":
        config = OmegaConf.create(config)
        OmegaConf.set_struct(config, kind == "struct")
        # On the inner node, where the flag of the outer one does not count.
        OmegaConf.set_readonly(config.actor_rollout_ref.rollout, kind == "read-only")
    with pytest.warns(LegacyFlagWarning, match=f"{FLAG} and skip.rollout.enable"):
        SkipManager.init(config)
    assert OmegaConf.select(OmegaConf.create(config), FLAG) is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SkipManager.init(config)
