"""Concatenate batches of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain as flatten
from typing import Any

from rlskip.merge.checks import (
    check_list,
    check_mapping,
    check_rows,
    is_mapping,
    naming_odd_tokens,
    trajectories,
)
from rlskip.merge.metrics import combine_metrics, format_metrics
from rlskip.merge.turns import IS_LAST, LOGPROBS, METRICS, REQUIRED, TIMES, TRAJECTORIES, MergeError

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
