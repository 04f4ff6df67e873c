"""Complete groups for the trainer, or a clear error: readiness, staleness, clean-up."""

from rlskip.replay.buffer import Refill, ReplayBuffer
from rlskip.replay.filtering import GroupFilter
from rlskip.replay.incomplete import IncompleteRolloutError, ReplayTimeoutError
from rlskip.replay.readiness import PromptOutcome

__all__ = [
    "GroupFilter",
    "IncompleteRolloutError",
    "PromptOutcome",
    "Refill",
    "ReplayBuffer",
    "ReplayTimeoutError",
]
