"""Skip flags of older trainers, with and without rlskip."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlskip import SkipManager
from rlskip.config.legacy import LegacyFlagWarning, retire_legacy_flags
from rlskip.errors import ConfigError

NEW_FORM = "actor_rollout_ref.rollout.skip.enable"
OLD_FORM = "actor_rollout_ref.rollout.skip_rollout"
ROLLOUT = {
    NEW_FORM: {"skip": {"enable": True}},
    OLD_FORM: {"skip_rollout": True},
}
YAML = """
actor_rollout_ref:
  rollout:
    skip: {enable: false, dump_dir: "~/.verl/rollout_dump"}
    skip_rollout: false
"""
SHOW = """
print("the task sees", cfg.actor_rollout_ref.rollout.skip.enable,
      cfg.actor_rollout_ref.rollout.skip_rollout)
train(cfg)
"""
ON = ("+skip=rollout_cache", "skip.dump_dir=dumps")


def test_a_single_run_turns_the_flag_off_for_the_task(make_app: Callable[..., Any]) -> None:
    app = make_app(config=YAML, task=SHOW)
    # What an override interpolates has another place in the list of overrides, and the values of
    # `hydra:` are there when the job starts.
    more = ("+b=${hydra:job.name}", "+c=${.b}", "skip.dump_dir=${hydra:runtime.output_dir}/dumps")
    run = app.run(*ON[:1], *more, *(f"{flag}=True" for flag in ROLLOUT))
    assert "the task sees False False" in run.out
    for flag in ROLLOUT:
        assert f"LegacyFlagWarning: {flag} and skip.rollout.enable are both true" in run.err
    assert "role rollout: 0 hits, 2 misses" in run.out


def test_a_multirun_refuses_and_names_the_override(make_app: Callable[..., Any]) -> None:
    app = make_app(config=YAML, task=SHOW)
    run = app.run("-m", *ON, f"{NEW_FORM}=True", fails=True)
    assert f"add the override {NEW_FORM}=False" in run.err
    assert app.generated == []


@pytest.mark.parametrize("flag", ROLLOUT)
@pytest.mark.parametrize("kind", ["dict", "DictConfig", "struct", "read-only"])
def test_init_turns_the_flag_off(flag: str, kind: str, tmp_path: Path) -> None:
    config: Any = {
        "skip": {"rollout": {"enable": True}, "dump_dir": str(tmp_path)},
        "actor_rollout_ref": {"rollout": copy.deepcopy(ROLLOUT[flag])},
    }
    if kind != "dict":
        config = OmegaConf.create(config)
        OmegaConf.set_struct(config, kind == "struct")
        # On the inner node, where the flag of the outer one does not count.
        OmegaConf.set_readonly(config.actor_rollout_ref.rollout, kind == "read-only")
    with pytest.warns(LegacyFlagWarning, match=f"{flag} and skip.rollout.enable"):
        SkipManager.init(config)
    assert OmegaConf.select(OmegaConf.create(config), flag) is False


def test_a_flag_that_cannot_be_changed_is_an_error() -> None:
    config = {"actor_rollout_ref": {"rollout": MappingProxyType({"skip_rollout": True})}}
    with pytest.raises(ConfigError, match=f"{OLD_FORM}: is true and cannot be turned off"):
        retire_legacy_flags(config, rollout_enabled=True)


def test_no_warning_without_a_legacy_flag() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        off: list[dict[str, Any]] = [{"skip": {"enable": False}}, {"skip_rollout": "off"}]
        for config in ({}, *({"actor_rollout_ref": {"rollout": rollout}} for rollout in off)):
            retire_legacy_flags(config, rollout_enabled=True)
            retire_legacy_flags(config, rollout_enabled=False)


# -- alone -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rollout", "option"),
    [
        ({"skip": {"enable": True, "action": "cache"}}, "+skip=rollout_cache"),
        ({"skip": {"enable": True, "action": "repeat_last"}}, "+skip=rollout_repeat"),
        # One dump for every step: that is repeat.
        ({"skip_rollout": True}, "+skip=rollout_repeat"),
    ],
)
def test_without_rlskip_the_warning_names_the_option(rollout: dict[str, Any], option: str) -> None:
    config = {"actor_rollout_ref": {"rollout": copy.deepcopy(rollout)}}
    with pytest.warns(LegacyFlagWarning, match="rlskip is not on") as caught:
        retire_legacy_flags(config, rollout_enabled=False)
    assert str(caught[0].message).endswith(f"Use instead: {option}")
    assert config == {"actor_rollout_ref": {"rollout": rollout}}
