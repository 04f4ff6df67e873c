"""The built-in roles; importing this module registers them, and imports torch."""

from rlskip.skip.async_rollout import AsyncRolloutSkip, parse_async_rollout_sample_step
from rlskip.skip.rollout import RolloutSkip
from rlskip.skip.rollout_tq import RolloutTqSkip

__all__ = ["AsyncRolloutSkip", "RolloutSkip", "RolloutTqSkip", "parse_async_rollout_sample_step"]
