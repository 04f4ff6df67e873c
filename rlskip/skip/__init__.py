"""Skip: the manager, the roles, and what a custom role needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlskip._lazy import load_on_use
from rlskip.config.skip import SKIP_REGISTRY, SkipAction
from rlskip.skip.manager import SkipManager
from rlskip.skip.role import BaseSkip, register_skip

if TYPE_CHECKING:
    from rlskip.skip.roles import RolloutSkip, parse_async_rollout_sample_step

__all__ = [
    "SKIP_REGISTRY",
    "BaseSkip",
    "RolloutSkip",
    "SkipAction",
    "SkipManager",
    "parse_async_rollout_sample_step",
    "register_skip",
]


# What makes roles needs torch.
__getattr__ = load_on_use(
    __name__, {"rlskip.skip.roles": ["RolloutSkip", "parse_async_rollout_sample_step"]}
)
