"""GeneratorOutputs put one after the other, and the metrics of their rows.

Names and definitions of the metrics are SkyRL's (``get_rollout_metrics``), so that existing curves
continue.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain as flatten
from typing import Any

import numpy as np

from rlskip.merge.checks import (
    check_list,
    check_mapping,
    check_numbers,
    check_rows,
    is_mapping,
    naming_odd_tokens,
    trajectories,
)
from rlskip.merge.turns import (
    IS_LAST,
    LOGPROBS,
    MASKS,
    METRICS,
    REQUIRED,
    RESPONSES,
    REWARDS,
    TIME_SPLITS,
    TIMES,
    TRAJECTORIES,
    MergeError,
)

# Present in every result; None if a batch lacks them.
_ALWAYS = (*REQUIRED, "stop_reasons", LOGPROBS, TIMES)


def concatenate_generator_outputs(
    outs: Sequence[Mapping[str, Any]], step_wise: bool = False
) -> dict[str, Any]:
    """Concatenate GeneratorOutputs, in time linear in the number of rows.

    Parameters
    ----------
    outs
        Dicts of lists (or of dicts of lists) with one entry per row; see
        :mod:`rlskip.merge.turns`.
    step_wise
        Also check that each trajectory of the result is complete and its rows consecutive.

    Returns
    -------
    dict
        Every field that occurs. An optional one is None if any batch lacks it. `rollout_metrics`
        holds the metrics of all rows, and the generators' own metrics combined by name.

    Raises
    ------
    MergeError
        There are no batches or no rows, lengths disagree, only some batches have log-probs, or a
        field is not a list.
    """
    if not isinstance(outs, list | tuple):
        raise MergeError(f"expected a list of batches, got {type(outs).__name__}")
    if not outs:
        raise MergeError("there is nothing to concatenate")
    for i, out in enumerate(outs):
        check_mapping(out, f"batch {i}")
    with_logprobs = [out.get(LOGPROBS) is not None for out in outs]
    if any(with_logprobs) and not all(with_logprobs):
        raise MergeError(
            f"batch {with_logprobs.index(False)} has none, batch {with_logprobs.index(True)} has",
            LOGPROBS,
            "a mix cannot be corrected: sample all of them with log-probs, or none",
        )
    names = dict.fromkeys(flatten(_ALWAYS, *outs))
    names.pop(METRICS, None)
    result = {name: _concatenate(name, [out.get(name) for out in outs]) for name in names}
    check_rows(result)
    if step_wise:
        trajectories(result.get(TRAJECTORIES), result.get(IS_LAST))
    own = combine_metrics(out.get(METRICS) for out in outs)
    with naming_odd_tokens(result):
        result[METRICS] = own | format_metrics(result, step_wise)
    return result


def _concatenate(name: str, values: list[Any]) -> Any:
    if any(value is None for value in values):
        return None
    if all(is_mapping(value) for value in values):
        keys = dict.fromkeys(flatten(*values))
        return {key: _concatenate(f"{name}.{key}", [v.get(key) for v in values]) for key in keys}
    for value in values:
        check_list(value, name)
    return list(flatten.from_iterable(values))


def format_metrics(out: Mapping[str, Any], step_wise: bool) -> dict[str, float]:
    """Response lengths, sampled tokens, turns and seconds of the rows of a list batch."""
    lengths = np.array([len(response) for response in out[RESPONSES]])
    rewards = np.array([sum(r) if isinstance(r, list) else r for r in out[REWARDS]])
    sampled = np.array([sum(mask) for mask in out[MASKS]])
    # All masks in one array with a 0 after each, so that no turn crosses the end of its row.
    turns = _runs(np.fromiter(flatten.from_iterable((*m, 0) for m in out[MASKS]), bool))
    seconds = _seconds(out, out[IS_LAST] if step_wise else None)
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
    for name, times in seconds.items():
        metrics |= {
            f"{name}_mean": np.mean(times),
            f"{name}_p90": np.percentile(times, 90),
            f"{name}_max": np.max(times),
        }
    return {f"generate/{name}": value.item() for name, value in metrics.items()}


def _seconds(out: Mapping[str, Any], is_last: list[Any] | None) -> dict[str, np.ndarray]:
    """The trajectories' times by the metric's name: all of each, its parts, and the rest.

    With `is_last`, each row of a trajectory has its times, and only the last row's count. The names
    are those of SkyRL 0.3.0.
    """

    def once(name: str, values: list[Any]) -> np.ndarray:
        check_numbers(values, name)
        array = np.array(values, dtype=np.float64)
        return array if is_last is None else array[np.array(is_last, dtype=bool)]

    times, parts = out.get(TIMES), out.get(TIME_SPLITS)
    seconds: dict[str, np.ndarray] = {}
    if times:
        whole = once(TIMES, times)
        seconds = {"trajectory_completion_time": whole}
    if parts:
        check_mapping(parts, TIME_SPLITS)
        for name, values in parts.items():
            seconds[f"trajectory_time_{name}"] = once(f"{TIME_SPLITS}.{name}", values)
        if times:
            named = [seconds[f"trajectory_time_{name}"] for name in parts]
            seconds["trajectory_time_other"] = whole - sum(named)
    return {name: array for name, array in seconds.items() if array.size}


def combine_metrics(parts: Iterable[Mapping[str, Any] | None]) -> dict[str, float]:
    """Combine a generator's own metrics of several batches: as the name says, else summed."""
    values: dict[str, list[float]] = defaultdict(list)
    for part in parts:
        if part is not None:
            check_mapping(part, METRICS)
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
    """Lengths of the runs of true values, one per turn."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return edges[1::2] - edges[::2]
