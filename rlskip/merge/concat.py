"""Several batches of rows as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain as flatten
from typing import Any

from rlskip.merge.metrics import combine_metrics, format_metrics
from rlskip.merge.rows import (
    IS_LAST,
    LOGPROBS,
    METRICS,
    REQUIRED,
    TRAJECTORIES,
    MergeError,
    check_rows,
    trajectories,
)

# Present in every result, None where a batch lacks them.
_ALWAYS = (*REQUIRED, "stop_reasons", LOGPROBS, "trajectory_generation_times")


def concatenate_generator_outputs(
    outs: Sequence[Mapping[str, Any]], step_wise: bool = False
) -> dict[str, Any]:
    """Concatenate GeneratorOutputs, in time linear in their rows.

    Parameters
    ----------
    outs
        Dicts of lists (or of dicts of lists) with one entry a row; see :mod:`rlskip.merge.rows`.
    step_wise
        Also check that the trajectories of the result are whole and stand together.

    Returns
    -------
    dict
        Every field that occurs. An optional one is None if any batch lacks it. `rollout_metrics`
        holds the format's metrics of all rows, and the generators' own ones combined by name.

    Raises
    ------
    MergeError
        No batches or no rows; lengths that disagree; log-probs in some batches only; a field
        that is no list.
    """
    if not outs:
        raise MergeError("there is nothing to concatenate")
    with_logprobs = [out.get(LOGPROBS) is not None for out in outs]
    if any(with_logprobs) and not all(with_logprobs):
        raise MergeError(
            f"batch {with_logprobs.index(False)} has none, batch {with_logprobs.index(True)} has",
            LOGPROBS,
            "a mix cannot be corrected for: sample all of them with log-probs, or none",
        )
    names = dict.fromkeys(flatten(_ALWAYS, *outs))
    names.pop(METRICS, None)
    result = {name: _concatenate(name, [out.get(name) for out in outs]) for name in names}
    check_rows(result)
    if step_wise:
        trajectories(result.get(TRAJECTORIES), result.get(IS_LAST))
    own = combine_metrics(out.get(METRICS) for out in outs)
    result[METRICS] = own | format_metrics(result, step_wise)
    return result


def _concatenate(name: str, values: list[Any]) -> Any:
    if any(value is None for value in values):
        return None
    if all(isinstance(value, Mapping) for value in values):
        keys = dict.fromkeys(flatten(*values))
        return {key: _concatenate(f"{name}.{key}", [v.get(key) for v in values]) for key in keys}
    for value in values:
        if not isinstance(value, list):
            raise MergeError(
                f"expected a list or a dict of lists in every batch, got {type(value).__name__}",
                name,
            )
    return list(flatten.from_iterable(values))
