"""The skip flag of older versions of verl, which must not act beside rlskip."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

from omegaconf import DictConfig
from omegaconf.omegaconf import read_write

from rlskip.config.check import look_up
from rlskip.errors import ConfigError

_NODE = "actor_rollout_ref.rollout.skip"
FLAG = f"{_NODE}.enable"


class LegacyFlagWarning(DeprecationWarning):
    """An older trainer's skip flag is in use."""


# Python hides DeprecationWarning outside `__main__`; this one is for the user who typed the flag.
warnings.simplefilter("default", LegacyFlagWarning)


def retire_legacy_flag(config: Any) -> None:
    """Set the flag False in `config`, a DictConfig or a mapping, where it is on, and warn."""
    if look_up(config, FLAG) is not True:
        return
    node = look_up(config, _NODE)
    with read_write(node) if isinstance(node, DictConfig) else nullcontext():
        node["enable"] = False
    message = f"{FLAG} and skip.rollout.enable are both true; rlskip acts and the legacy flag is "
    warnings.warn(f"{message}forced to False. Remove {FLAG}.", LegacyFlagWarning, stacklevel=3)


def refuse_legacy_flag(config: Any) -> None:
    """Raise if the flag is on, because turning it off would not reach the task."""
    if look_up(config, FLAG) is True:
        what = "is true together with skip.rollout.enable, and in a multirun rlskip cannot turn it "
        raise ConfigError(f"{what}off for the task", FLAG, f"add the override {FLAG}=False")
