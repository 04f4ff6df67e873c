"""What SkyRL's trainer computes, recorded for `rlskip compare`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlskip import stages
from rlskip._wrap import around
from rlskip.config.other_nodes import RecordConfig

#: SkyRL's fields by the names that all hosts share, in the order in which a step computes them.
FIELDS = {
    "rollout_logprobs": "engine_log_probs",
    "action_log_probs": "old_log_probs",
    "base_action_log_probs": "ref_log_probs",
    "values": "values",
    "rewards": "rewards",
    "advantages": "advantages",
    "returns": "returns",
}


def record_stages(trainer: Any, settings: RecordConfig) -> None:
    """Record what this trainer of SkyRL computes on the driver: :data:`FIELDS`."""
    stages.start(settings, lambda: trainer.global_step)
    trainer.compute_advantages_and_returns = _computing(trainer.compute_advantages_and_returns)
    trainer.train = _training(trainer.train)


@around
def _computing(compute: Callable[..., Any], data: Any) -> Any:
    result = compute(data)
    tokens, trained, sampled = result["sequences"], result["loss_mask"], result["response_mask"]
    n, width = len(tokens) - result.metadata.get("pad_size", 0), tokens.shape[1]

    def whole(value: torch.Tensor) -> torch.Tensor:
        """One entry for each token of the row: SkyRL aligns responses, which are last, right."""
        return torch.nn.functional.pad(value[:n], (width - value.shape[1], 0))

    # A row that is left out of the loss has sampled tokens, too.
    mask = torch.where(trained.bool().any(1, keepdim=True), trained, sampled)
    rows = {
        "input_ids": tokens[:n],
        "attention_mask": result["attention_mask"][:n],
        "response_mask": whole(mask),
    }
    for field, name in FIELDS.items():
        if result.get(field) is not None:
            stages.record(name, whole(result[field]), rows=rows)
    return result


@around
async def _training(train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return await train(*args, **kwargs)
    finally:  # the process that trains is killed later
        stages.stop()
