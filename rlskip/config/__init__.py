"""Structured configs, the steps grammar, validation, legacy flags. Imports nothing heavy.

The submodules load on first use, because Hydra imports :mod:`rlskip.config.register` at the start
of every application.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlskip.config.dispatch import DispatchConfig
    from rlskip.config.merge import MergeConfig
    from rlskip.config.replay import ReplayConfig
    from rlskip.config.skip import (
        RoleConfig,
        RolloutValSkipConfig,
        SkipManagerConfig,
    )
    from rlskip.config.steps import Steps

__all__ = [
    "DispatchConfig",
    "MergeConfig",
    "ReplayConfig",
    "RoleConfig",
    "RolloutValSkipConfig",
    "SkipManagerConfig",
    "Steps",
]

_HOME = {
    "DispatchConfig": "rlskip.config.dispatch",
    "MergeConfig": "rlskip.config.merge",
    "ReplayConfig": "rlskip.config.replay",
    "Steps": "rlskip.config.steps",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_HOME.get(name, "rlskip.config.skip")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
