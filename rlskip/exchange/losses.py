"""Advantages and losses of GRPO, RLOO and PPO in plain torch, to compute a recorded step again.

They do what verl and TRL do, operation by operation, so that equal inputs give equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def grpo(
    rewards: torch.Tensor, groups: Sequence[str], eps: float = 1e-6, scale: bool = True
) -> torch.Tensor:
    """A reward's distance from its group's mean, in standard deviations of the group.

    Rewards are one for each session, float32. `eps` is added to the deviation: 1e-6 in verl, 1e-4
    in TRL. Dr. GRPO does not divide (`scale`).
    """
    found = torch.empty_like(rewards)
    for members in _members(groups):
        own = rewards[members]
        if len(members) == 1:  # verl: mean 0, deviation 1
            found[members] = own / (1 + eps) if scale else own
            continue
        gaps = own - own.mean()
        found[members] = gaps / (own.std() + eps) if scale else gaps
    return found


def rloo(rewards: torch.Tensor, groups: Sequence[str]) -> torch.Tensor:
    """A reward's distance from the mean of the other sessions of its group."""
    found = rewards.clone()
    for members in _members(groups):
        n = len(members)
        if n > 1:
            own = rewards[members]
            found[members] = own * n / (n - 1) - own.mean() * n / (n - 1)
    return found


def clipped(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip: float = 0.2,
    clip_high: float | None = None,
    clip_c: float | None = None,
) -> torch.Tensor:
    """PPO's clipped loss, also that of GRPO and RLOO: the mean over all sampled tokens.

    All have a value for each token; the mask is 1 where it was sampled. The ratio may be `clip`
    below and `clip_high` above 1; `clip_c` is verl's ``clip_ratio_c``, the most that a ratio counts
    where the advantage is negative.
    """
    ratio = torch.exp(torch.clamp(log_probs - old_log_probs, -20.0, 20.0))
    bounded = torch.clamp(ratio, 1 - clip, 1 + (clip if clip_high is None else clip_high))
    losses = torch.maximum(-advantages * ratio, -advantages * bounded)
    if clip_c is not None:
        losses = torch.where(advantages < 0, torch.minimum(-advantages * clip_c, losses), losses)
    return (losses * mask).sum() / mask.sum().clamp(min=1)


ADVANTAGES = {"grpo": grpo, "rloo": rloo}
LOSSES = {"grpo": clipped, "rloo": clipped, "ppo": clipped}


def _members(groups: Sequence[str]) -> list[list[int]]:
    found: dict[str, list[int]] = {}
    for i, name in enumerate(groups):
        found.setdefault(name, []).append(i)
    return list(found.values())
