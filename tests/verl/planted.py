"""A bug in verl's trainer: loaded by ``import verl`` in each process, planted by $PLANTED.

And a critic and a reference policy for the CPU: verl asks for FlashAttention and for pinned memory,
and draws the critic's head at random.

The functions are wrapped when their module is imported, so verl itself is as it was installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rlskip._wrap import around, when_imported, wrap


@around
def _shifted_mask(compute: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
    data.batch["response_mask"] = data.batch["response_mask"].roll(1, -1)
    return compute(data, *args, **kwargs)


@around
def _other_denominator(compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    data = compute(*args, **kwargs)
    data.batch["advantages"] = data.batch["advantages"] / 2
    return data


@around
def _other_sign(penalty: Callable[..., Any], logprob: Any, ref_logprob: Any, **kwargs: Any) -> Any:
    return penalty(ref_logprob, logprob, **kwargs)


@around
def _one_nan(compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    data = compute(*args, **kwargs)
    data.batch["values"][3, 0] = float("nan")
    return data


@around
def _eager(load: Callable[..., Any], local_path: str, model_config: Any, **given: Any) -> Any:
    import torch
    from transformers import AutoModelForTokenClassification

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForTokenClassification.from_pretrained(
            local_path, config=model_config, attn_implementation="eager", **given
        )


def _unpinned(module: ModuleType) -> None:
    offload = module.CPUOffloadPolicy
    module.CPUOffloadPolicy = lambda pin_memory: offload(pin_memory=False)  # type: ignore[attr-defined]


PPO = "verl.trainer.ppo"
BUGS = {
    "mask": (f"{PPO}.ray_trainer:compute_advantage", _shifted_mask),
    "advantages": (f"{PPO}.ray_trainer:compute_advantage", _other_denominator),
    "kl_sign": (f"{PPO}.core_algos:kl_penalty", _other_sign),
    "nan": (f"{PPO}.ray_trainer:RayPPOTrainer._compute_values", _one_nan),
}

when_imported("verl.workers.engine.fsdp.transformer_impl", _unpinned)
wrap("verl.utils.model:load_valuehead_model", _eager, key="planted")
if planted := os.environ.get("PLANTED"):
    wrap(*BUGS[planted], key="planted")  # type: ignore[arg-type]
