"""Skip: the manager, the roles, and what a custom role needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    # The built-in roles need torch, so they load when a name of theirs is first used.
    if name in __all__:
        import rlskip.skip.roles

        return getattr(rlskip.skip.roles, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
