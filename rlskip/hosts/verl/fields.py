"""Fields of verl's rollouts: what a run needs, and what a replay must not report as its own."""

from __future__ import annotations

from typing import Any

from rlskip.batch.fields import field_names
from rlskip.config.check import look_up

# A key that is on -> the fields that the trainer then needs.
NEEDED = {
    "actor_rollout_ref.rollout.calculate_log_probs": ("rollout_log_probs",),
    "actor_rollout_ref.rollout.enable_rollout_routing_replay": ("routed_experts",),
    "distillation.enabled": ("teacher_ids", "teacher_logprobs"),
}
# Seconds in the metrics of a session.
_TIMES = ("generate_sequences", "tool_calls", "compute_score")


def lacking(config: Any, rollouts: Any) -> list[str]:
    """What a run of `config` needs and `rollouts` do not have, each with the key that needs it."""
    has = field_names(rollouts)
    return [
        f"{field} ({key}={look_up(config, key)})"
        for key, fields in NEEDED.items()
        if look_up(config, key)
        for field in fields
        if field not in has
    ]


def without_times(rollouts: Any) -> Any:
    """A replayed DataProto, changed in place: without the times that the dump's run took.

    The trainer would log them as its own: ``timing_s/agent_loop/*``, and ``processing_time/*`` of
    the fully async trainer, which reads the metrics of each session.
    """
    meta = rollouts.meta_info
    if "timing" in meta:
        meta["timing"] = {}
    if "metrics" in meta:
        meta["metrics"] = [
            {name: 0.0 if name in _TIMES else value for name, value in session.items()}
            for session in meta["metrics"]
        ]
    return rollouts
