"""Complete groups for the trainer, or a clear error: readiness, staleness, clean-up."""

from rlskip.replay.buffer import Refill, ReplayBuffer
from rlskip.replay.incomplete import IncompleteRolloutError, ReplayTimeoutError
from rlskip.replay.readiness import PromptOutcome

__all__ = [
    "IncompleteRolloutError",
    "PromptOutcome",
    "Refill",
    "ReplayBuffer",
    "ReplayTimeoutError",
]
