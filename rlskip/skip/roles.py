"""The built-in roles; importing this module registers them, and imports torch."""

from rlskip.skip.async_rollout import AsyncRolloutSkip, parse_async_rollout_sample_step
from rlskip.skip.rollout import RolloutSkip
from rlskip.skip.rollout_tq import RolloutTqSkip
from rlskip.skip.validation import RolloutValSkip

__all__ = [
    "AsyncRolloutSkip",
    "RolloutSkip",
    "RolloutTqSkip",
    "RolloutValSkip",
    "parse_async_rollout_sample_step",
]
