"""Skip: the manager, the roles, and what a custom role needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlskip._lazy import load_on_use
from rlskip.skip.manager import SkipManager
from rlskip.skip.role import SKIP_REGISTRY, BaseSkip, SkipAction, register_skip

if TYPE_CHECKING:
    from rlskip.skip.roles import (
        AsyncRolloutSkip,
        RolloutSkip,
        RolloutTqSkip,
        parse_async_rollout_sample_step,
    )

__all__ = [
    "SKIP_REGISTRY",
    "AsyncRolloutSkip",
    "BaseSkip",
    "RolloutSkip",
    "RolloutTqSkip",
    "SkipAction",
    "SkipManager",
    "parse_async_rollout_sample_step",
    "register_skip",
]


# The built-in roles need torch.
__getattr__ = load_on_use(
    __name__,
    {
        "rlskip.skip.roles": [
            "AsyncRolloutSkip",
            "RolloutSkip",
            "RolloutTqSkip",
            "parse_async_rollout_sample_step",
        ]
    },
)
