"""Skip flags of older trainers: warn about them, and turn them off when rlskip is on.

verl 0.6 - 0.7.1 names the flag ``actor_rollout_ref.rollout.skip_rollout``, verl 0.8
``actor_rollout_ref.rollout.skip.enable``; 0.9 has neither.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

from omegaconf import DictConfig
from omegaconf.omegaconf import read_write

from rlskip.config.check import look_up
from rlskip.errors import ConfigError

_ROLLOUT = "actor_rollout_ref.rollout"

_LEGACY = (f"{_ROLLOUT}.skip.enable", f"{_ROLLOUT}.skip_rollout")


class LegacyFlagWarning(DeprecationWarning):
    """An older trainer's skip flag is in use."""


# Python hides DeprecationWarning outside `__main__`; this one is for the user who typed the flag.
warnings.simplefilter("default", LegacyFlagWarning)


def legacy_flags(config: Any) -> list[str]:
    """Keys of the legacy flags that are on in a full config."""
    return [key for key in _LEGACY if look_up(config, key) is True]


def retire_legacy_flags(config: Any, rollout_enabled: bool) -> None:
    """Warn about legacy flags; with `rollout_enabled` also set them False in `config`.

    Otherwise both mechanisms would act on one stage. Works on a read-only or struct DictConfig
    and on nested mutable mappings.

    Raises
    ------
    ConfigError
        A flag is in a mapping that cannot be changed.
    """
    for key in legacy_flags(config):
        if rollout_enabled:
            above, _, name = key.rpartition(".")
            holder = look_up(config, above)
            try:
                with read_write(holder) if isinstance(holder, DictConfig) else nullcontext():
                    holder[name] = False
            except TypeError as error:
                what, remedy = "is true and cannot be turned off here", f"set {key} to false"
                raise ConfigError(what, key, remedy) from error
            message = (
                f"{key} and skip.rollout.enable are both true; rlskip acts and the legacy flag "
                f"is forced to False. Remove {key}."
            )
        else:
            # Without an action, the older trainer replayed its only dump at every step.
            cached = look_up(config, key.replace("skip.enable", "skip.action")) == "cache"
            message = f"{key} is a legacy flag, and rlskip is not on. Use instead: +skip=rollout_"
            message += "cache" if cached else "repeat"
        warnings.warn(message, LegacyFlagWarning, stacklevel=3)


def refuse_legacy_flags(config: Any) -> None:
    """Raise if a legacy flag is on, because turning it off would not reach the task."""
    for key in legacy_flags(config):
        raise ConfigError(
            "is true together with skip.rollout.enable, and in a multirun rlskip cannot turn it "
            "off for the task",
            key,
            f"add the override {key}=False",
        )
