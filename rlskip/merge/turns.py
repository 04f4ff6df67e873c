"""The rows that merging reads: SkyRL's GeneratorOutput.

A row is one turn: the model's input (`prompt_token_ids`), its output (`response_ids`), and other
fields with one entry per row or one value per response token. Names and meanings are SkyRL's
(``skyrl/train/generators/base.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from rlskip.errors import RlskipError

PROMPTS = "prompt_token_ids"
RESPONSES = "response_ids"
REWARDS = "rewards"
MASKS = "loss_masks"
LOGPROBS = "rollout_logprobs"
TRAJECTORIES = "trajectory_ids"
IS_LAST = "is_last_step"
METRICS = "rollout_metrics"
TIMES = "trajectory_generation_times"
TIME_SPLITS = "trajectory_time_splits"

REQUIRED = (PROMPTS, RESPONSES, REWARDS, MASKS)

# Fields with one value per response token, and the value for tokens of an observation, which are
# not trained. (`rewards` may also hold one number per row; see `token_fields`.)
_PER_TOKEN: dict[str, float] = {MASKS: 0, REWARDS: 0.0, LOGPROBS: 0.0}

# One value per token, patch or image: the last turn's values alone would be misaligned.
NOT_CARRIED = (
    "rollout_expert_indices",
    "rollout_sample_support",
    "routed_experts",
    "pixel_values",
    "image_grid_thw",
    "multi_modal_inputs",
    "multi_modal_data",
)


NUMBER = (int, float, np.integer, np.floating, np.bool_)


class MergeError(RlskipError, ValueError, AssertionError):
    """Rows that cannot be merged; `where` names the field and the row.

    Also an AssertionError, which SkyRL raises in these cases.
    """


@attrs.frozen(order=True)
class TrajectoryID:
    """SkyRL's trajectory id, hashable: session `repetition_id` of prompt `instance_id`.

    Any other hashable value is a valid trajectory id, and so is SkyRL's own class.
    """

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        return f"{self.instance_id}_{self.repetition_id}"


def token_fields(out: Mapping[str, Any]) -> dict[str, float]:
    """The format's own fields with one value per response token, and their empty value."""
    return {
        name: nothing
        for name, nothing in _PER_TOKEN.items()
        if out.get(name) is not None and (name != REWARDS or is_token_reward(out[name][0]))
    }


def is_token_reward(reward: Any) -> bool:
    """A reward per row is a number, which has no length; a 0-d tensor has none either."""
    return hasattr(reward, "__len__") and getattr(reward, "ndim", 1) > 0
