"""rlskip: skip, dispatch, gather and merge the rollouts of RL post-training.

Importing this package is light: torch, tensordict and Ray load when a name that needs them
is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlskip._lazy import load_on_use
from rlskip._version import __version__ as __version__

if TYPE_CHECKING:
    from rlskip.config.other_nodes import DispatchConfig as DispatchConfig
    from rlskip.config.other_nodes import MergeConfig as MergeConfig
    from rlskip.config.other_nodes import RecordConfig as RecordConfig
    from rlskip.config.other_nodes import ReplayConfig as ReplayConfig
    from rlskip.config.skip import AsyncRolloutSkipConfig as AsyncRolloutSkipConfig
    from rlskip.config.skip import RoleConfig as RoleConfig
    from rlskip.config.skip import RolloutSkipConfig as RolloutSkipConfig
    from rlskip.config.skip import RolloutTqSkipConfig as RolloutTqSkipConfig
    from rlskip.config.skip import RolloutValSkipConfig as RolloutValSkipConfig
    from rlskip.config.skip import SkipManagerConfig as SkipManagerConfig
    from rlskip.exchange.write import write as write
    from rlskip.rescore.judge import cached_reward as cached_reward
    from rlskip.runs.find import open as open
    from rlskip.skip import BaseSkip as BaseSkip
    from rlskip.skip import SkipAction as SkipAction
    from rlskip.skip import SkipManager as SkipManager
    from rlskip.skip import register_skip as register_skip
    from rlskip.stages import record as record

_HOMES = {
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
}

__all__ = [name for names in _HOMES.values() for name in names]

__getattr__ = load_on_use(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
