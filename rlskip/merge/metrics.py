"""The metrics that belong to the format: what a GeneratorOutput says of its own rows.

Names and definitions are SkyRL's (``get_rollout_metrics``), so that a curve goes on where it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain as flatten
from typing import Any

import numpy as np

from rlskip.merge.rows import IS_LAST, MASKS, RESPONSES, REWARDS


def format_metrics(out: Mapping[str, Any], step_wise: bool) -> dict[str, float]:
    """Response lengths, sampled tokens, turns and times of the rows of a list batch."""
    lengths = np.array([len(response) for response in out[RESPONSES]])
    rewards = np.array([sum(r) if isinstance(r, list) else r for r in out[REWARDS]])
    sampled = np.array([sum(mask) for mask in out[MASKS]])
    # All masks as one, a 0 after each: no turn goes over the end of its row.
    turns = _runs(np.fromiter(flatten.from_iterable((*m, 0) for m in out[MASKS]), bool))
    times = out.get("trajectory_generation_times")
    if times and step_wise:
        # Every row of a trajectory carries its time: count it once.
        times = [time for time, is_last in zip(times, out[IS_LAST], strict=True) if is_last]

    metrics = {
        "min_num_tokens": lengths.min(),
        "max_num_tokens": lengths.max(),
        "avg_num_tokens": lengths.mean(),
        "std_num_tokens": lengths.std(),
        "avg_tokens_non_zero_rewards": _mean(lengths[rewards > 0]),
        "avg_tokens_zero_rewards": _mean(lengths[rewards == 0]),
        "avg_assistant_tokens": sampled.mean(),
        "min_assistant_tokens": sampled.min(),
        "max_assistant_tokens": sampled.max(),
        "std_assistant_tokens": sampled.std(),
    }
    if turns.size:
        metrics |= {
            "tokens_per_turn_mean": turns.mean(),
            "tokens_per_turn_std": turns.std(),
            "tokens_per_turn_max": turns.max(),
        }
    if times:
        metrics |= {
            "trajectory_completion_time_mean": np.mean(times),
            "trajectory_completion_time_p90": np.percentile(times, 90),
            "trajectory_completion_time_max": np.max(times),
        }
    return {f"generate/{name}": value.item() for name, value in metrics.items()}


def combine_metrics(parts: Iterable[Mapping[str, Any] | None]) -> dict[str, float]:
    """A generator's own metrics of several batches as one: as the name says, else summed."""
    values: dict[str, list[float]] = defaultdict(list)
    for part in parts:
        for name, value in (part or {}).items():
            if isinstance(value, (int, float)):
                values[name].append(value)
    return {name: _combined(name, numbers) for name, numbers in values.items()}


def _combined(name: str, numbers: list[float]) -> float:
    if "avg" in name or "mean" in name:
        return sum(numbers) / len(numbers)
    if "min" in name:
        return min(numbers)
    return max(numbers) if "max" in name else sum(numbers)


def _mean(values: np.ndarray) -> Any:
    return values.mean() if values.size else np.float64(0)


def _runs(mask: np.ndarray) -> np.ndarray:
    """Lengths of the stretches that are true: one a turn."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return edges[1::2] - edges[::2]
