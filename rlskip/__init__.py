"""rlskip: skip, dispatch, gather and merge the rollouts of RL post-training.

Importing this package is light: torch, tensordict and Ray load when a name that needs them
is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlskip._lazy import load_on_use
from rlskip._version import __version__ as __version__

if TYPE_CHECKING:
    from rlskip.config.other_nodes import DispatchConfig, MergeConfig, RecordConfig, ReplayConfig
    from rlskip.config.skip import (
        AsyncRolloutSkipConfig,
        RoleConfig,
        RolloutSkipConfig,
        RolloutTqSkipConfig,
        RolloutValSkipConfig,
        SkipManagerConfig,
    )
    from rlskip.exchange.write import write
    from rlskip.rescore.judge import cached_reward
    from rlskip.runs.find import open as open
    from rlskip.skip import BaseSkip, SkipAction, SkipManager, register_skip
    from rlskip.stages import record

__all__ = [
    "AsyncRolloutSkipConfig",
    "BaseSkip",
    "DispatchConfig",
    "MergeConfig",
    "RecordConfig",
    "ReplayConfig",
    "RoleConfig",
    "RolloutSkipConfig",
    "RolloutTqSkipConfig",
    "RolloutValSkipConfig",
    "SkipAction",
    "SkipManager",
    "SkipManagerConfig",
    "cached_reward",
    "open",
    "record",
    "register_skip",
    "write",
]

__getattr__ = load_on_use(
    __name__,
    {
        "rlskip.config.other_nodes": [
            "DispatchConfig",
            "MergeConfig",
            "RecordConfig",
            "ReplayConfig",
        ],
        "rlskip.config.skip": [
            "AsyncRolloutSkipConfig",
            "RoleConfig",
            "RolloutSkipConfig",
            "RolloutTqSkipConfig",
            "RolloutValSkipConfig",
            "SkipManagerConfig",
        ],
        "rlskip.runs.find": ["open"],
        "rlskip.exchange.write": ["write"],
        "rlskip.skip": ["BaseSkip", "SkipAction", "SkipManager", "register_skip"],
        "rlskip.stages": ["record"],
        "rlskip.rescore.judge": ["cached_reward"],
    },
)


def __dir__() -> list[str]:
    return __all__
