"""GeneratorOutputs put one after the other, and the metrics of their rows.

Names and definitions of the metrics are SkyRL's (``get_rollout_metrics``), so that existing curves
continue.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain as flatten
from statistics import fmean
from typing import Any

import numpy as np

from rlskip.merge import turns
from rlskip.merge.turns import IS_LAST, LOGPROBS, MASKS, METRICS, RESPONSES, REWARDS, TIMES, expect

# Present in every result; None if a batch lacks them.
_ALWAYS = (*turns.REQUIRED, "stop_reasons", LOGPROBS, TIMES)


def concatenate_generator_outputs(
    outs: Sequence[Mapping[str, Any]], step_wise: bool = False
) -> dict[str, Any]:
    """Concatenate GeneratorOutputs, in time linear in the number of rows.

    Every field that occurs is kept; an optional one is None if any batch lacks it.
    `rollout_metrics` holds the metrics of all rows, and the generators' own combined by name. A
    MergeError names what is missing, disagrees, or is only in some batches (log-probs).

    Parameters
    ----------
    outs
        Dicts of lists (or of dicts of lists) with one entry per row.
    step_wise
        Also check that each trajectory of the result is complete and its rows consecutive.
    """
    what = f"expected a list of batches, got {type(outs).__name__}"
    expect(isinstance(outs, list | tuple), what)
    expect(bool(outs), "there is nothing to concatenate")
    for i, out in enumerate(outs):
        turns.expect_a(dict, out, f"batch {i}")
    has = [out.get(LOGPROBS) is not None for out in outs]
    if any(has):
        what = f"batch {[*has, False].index(False)} has none, batch {has.index(True)} has"
        remedy = "a mix cannot be corrected: sample all of them with log-probs, or none"
        expect(all(has), what, LOGPROBS, remedy)
    names = dict.fromkeys(flatten(_ALWAYS, *outs))
    names.pop(METRICS, None)
    result = {name: _concatenate(name, [out.get(name) for out in outs]) for name in names}
    turns.check_rows(result)
    if step_wise:
        turns.trajectories(result.get(turns.TRAJECTORIES), result.get(IS_LAST))
    own = combine_metrics(out.get(METRICS) for out in outs)
    with turns.naming_odd_tokens(result):
        result[METRICS] = own | format_metrics(result, step_wise)
    return result


def _concatenate(name: str, values: list[Any]) -> Any:
    if any(value is None for value in values):
        return None
    if all(turns.is_mapping(value) for value in values):
        keys = dict.fromkeys(flatten(*values))
        return {key: _concatenate(f"{name}.{key}", [v.get(key) for v in values]) for key in keys}
    for value in values:
        turns.expect_a(list, value, name)
    return list(flatten.from_iterable(values))


def format_metrics(out: Mapping[str, Any], step_wise: bool) -> dict[str, float]:
    """Response lengths, sampled tokens, turns and seconds of the rows of a list batch."""
    lengths = np.array([len(response) for response in out[RESPONSES]])
    rewards = np.array([sum(r) if isinstance(r, list) else r for r in out[REWARDS]])
    sampled = np.array([sum(mask) for mask in out[MASKS]])
    metrics: dict[str, Any] = {}
    for name, rows in (("non_zero", rewards > 0), ("zero", rewards == 0)):
        metrics[f"avg_tokens_{name}_rewards"] = lengths[rows].sum() / max(1, rows.sum())
    for name, counts in (("num_tokens", lengths), ("assistant_tokens", sampled)):
        metrics |= {f"min_{name}": counts.min(), f"max_{name}": counts.max()}
        metrics |= {f"avg_{name}": counts.mean(), f"std_{name}": counts.std()}
    # All masks in one array with a 0 after each, so that no turn crosses the end of its row.
    flat = np.fromiter(flatten.from_iterable((*mask, 0) for mask in out[MASKS]), bool)
    edges = np.flatnonzero(np.diff(flat, prepend=False, append=False))
    if edges.size:
        said = edges[1::2] - edges[::2]
        metrics |= {
            f"tokens_per_turn_{how}": getattr(said, how)() for how in ("mean", "std", "max")
        }
    seconds = _seconds(out, out[IS_LAST] if step_wise else None)
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
    parts = out.get(turns.TIME_SPLITS) or {}
    turns.expect_a(dict, parts, turns.TIME_SPLITS)

    def array(values: Any, name: str) -> np.ndarray:
        turns.check_numbers(values, name)
        found = np.array(values, dtype=np.float64)
        return found if is_last is None else found[np.array(is_last, dtype=bool)]

    seconds = {
        f"trajectory_time_{name}": array(values, f"{turns.TIME_SPLITS}.{name}")
        for name, values in parts.items()
    }
    if times := out.get(TIMES):
        whole = array(times, TIMES)
        if seconds:
            seconds["trajectory_time_other"] = whole - sum(seconds.values())
        seconds["trajectory_completion_time"] = whole
    return {name: found for name, found in seconds.items() if found.size}


def combine_metrics(parts: Iterable[Mapping[str, Any] | None]) -> dict[str, float]:
    """Combine a generator's own metrics of several batches: as the name says, else summed."""
    values: dict[str, list[float]] = defaultdict(list)
    for part in parts:
        if part is not None:
            turns.expect_a(dict, part, METRICS)
        for name, value in (part or {}).items():
            if isinstance(value, (int, float)):
                values[name].append(value)
    by_name: dict[str, Callable[[list[float]], float]] = {
        "avg": fmean, "mean": fmean, "min": min, "max": max,
    }  # fmt: skip
    return {
        name: next((how for word, how in by_name.items() if word in name), sum)(numbers)
        for name, numbers in values.items()
    }
