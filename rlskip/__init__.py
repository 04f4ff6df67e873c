"""rlskip: skip, dispatch, gather and merge the rollouts of RL post-training.

Importing this package is light: torch, tensordict and Ray load when a name that needs them
is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlskip.config import (
        DispatchConfig,
        MergeConfig,
        ReplayConfig,
        RoleConfig,
        RolloutValSkipConfig,
        SkipManagerConfig,
    )
    from rlskip.skip import BaseSkip, SkipAction, SkipManager, register_skip

from rlskip._version import __version__ as __version__

__all__ = [
    "BaseSkip",
    "DispatchConfig",
    "MergeConfig",
    "ReplayConfig",
    "RoleConfig",
    "RolloutValSkipConfig",
    "SkipAction",
    "SkipManager",
    "SkipManagerConfig",
    "register_skip",
]

_HOME = {
    "BaseSkip": "rlskip.skip",
    "DispatchConfig": "rlskip.config",
    "MergeConfig": "rlskip.config",
    "ReplayConfig": "rlskip.config",
    "RoleConfig": "rlskip.config",
    "RolloutValSkipConfig": "rlskip.config",
    "SkipAction": "rlskip.skip",
    "SkipManager": "rlskip.skip",
    "SkipManagerConfig": "rlskip.config",
    "register_skip": "rlskip.skip",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
