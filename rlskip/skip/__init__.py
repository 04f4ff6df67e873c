"""Skip: the manager, the roles, and what a role of one's own needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlskip.skip.base import SKIP_REGISTRY, BaseSkip, SkipAction, register_skip
from rlskip.skip.manager import SkipManager

if TYPE_CHECKING:
    from rlskip.skip.roles import (
        AsyncRolloutSkip,
        RolloutSkip,
        parse_async_rollout_sample_step,
    )
    from rlskip.skip.rollout_tq import RolloutTqSkip

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

# The built-in roles need torch, so they load when a name of theirs is first used.
_IN_ROLES = {"AsyncRolloutSkip", "RolloutSkip", "parse_async_rollout_sample_step"}


def __getattr__(name: str) -> Any:
    if name in _IN_ROLES:
        import rlskip.skip.roles

        return getattr(rlskip.skip.roles, name)
    if name == "RolloutTqSkip":
        from rlskip.skip.rollout_tq import RolloutTqSkip

        return RolloutTqSkip
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
