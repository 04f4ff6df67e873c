"""Merging a batch of Python lists: SkyRL's GeneratorOutput in, the same out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from rlskip.merge.chains import Chain, Rows, link
from rlskip.merge.metrics import format_metrics
from rlskip.merge.rows import (
    IS_LAST,
    METRICS,
    PROMPTS,
    RESPONSES,
    TRAJECTORIES,
    MergeError,
    check_carried,
    check_count,
    check_rows,
    token_fields,
    trajectories,
)


def merge_stepwise_output(out: Mapping[str, Any]) -> dict[str, Any]:
    """Fold consecutive turns into one row wherever the later prompt continues the earlier row.

    Turn i+1 joins turn i when the whole of turn i, prompt and response, is a prefix of the
    prompt of turn i+1. The merged row has the first turn's prompt; its response is all responses
    with the observations between them, which get loss mask 0, reward 0, log-prob 0, and 0 in any
    extra field whose entries are all lists of numbers as long as their responses. Whatever a row
    holds once (`stop_reasons`, `is_last_step`, a reward per row, any other field) is taken from
    the last turn. This is SkyRL's rule (NovaSky-AI/SkyRL#1532), except that fields it drops are
    kept.

    Parameters
    ----------
    out
        A step-wise GeneratorOutput: a dict of lists, one entry a turn, a trajectory's turns
        together and in order. Not changed, and not shared with the result.

    Raises
    ------
    MergeError
        Naming field and row; see :func:`rlskip.merge.rows.check_rows`,
        :func:`~rlskip.merge.rows.trajectories` and :func:`~rlskip.merge.rows.check_carried`.
    """
    rows = list_rows(out)
    return fold_lists(out, rows, [chain for chains in link(rows) for chain in chains])


@attrs.frozen
class ListRows(Rows):
    """Rows as Python lists, whose comparison costs most of a merge.

    A slice would touch every token once more, twice with freeing it. So a row that ends a chain
    has its tokens in a list of our own, which only grows: by what the next row adds to it.
    """

    _contexts: dict[int, list[int]] = attrs.field(factory=dict, init=False, eq=False, repr=False)

    def continues(self, j: int, i: int) -> bool:
        later, start, end = self.prompts[j], len(self.prompts[i]), self.length(i)
        if self.responses[i] != later[start:end]:
            return False
        context = self._contexts.pop(i, None) or [*self.prompts[i], *self.responses[i]]
        if not _starts_with(later, context):
            return False
        context += later[end:]
        context += self.responses[j]
        self._contexts[j] = context
        return True


class _End:
    """Ends a list, and notes whether a comparison came so far."""

    reached = False

    def __eq__(self, other: object) -> bool:
        self.reached = True
        return False

    def __lt__(self, other: object) -> bool:
        return True


def _starts_with(later: list[int], context: list[int]) -> bool:
    """Whether `context` is a prefix of `later`, found without copying either."""
    if len(context) >= len(later):
        return context == later
    # An order is decided by the first items that differ: the end, if all before it is equal.
    end = _End()
    context.append(end)  # type: ignore[arg-type]
    _ = context < later
    context.pop()
    return end.reached


def list_rows(out: Mapping[str, Any]) -> Rows:
    """The checked tokens of a list batch."""
    check_rows(out)
    check_carried([name for name, value in out.items() if value is not None])
    spans = trajectories(out.get(TRAJECTORIES), out.get(IS_LAST))
    return ListRows(out[PROMPTS], out[RESPONSES], spans)


def fold_lists(out: Mapping[str, Any], rows: Rows, chains: list[Chain]) -> dict[str, Any]:
    """One row for each chain of a list batch."""
    per_token = token_fields(out)
    last = [chain[-1] for chain in chains]
    merged: dict[str, Any] = {
        name: _of_last_turns(name, value, last, len(out[RESPONSES]))
        for name, value in out.items()
        if name not in (PROMPTS, RESPONSES, METRICS, *per_token)
    }
    merged[PROMPTS] = [list(out[PROMPTS][chain[0]]) for chain in chains]
    merged |= {name: [] for name in (RESPONSES, *per_token)}
    for chain in chains:
        row: dict[str, list[float]] = {name: [] for name in (RESPONSES, *per_token)}
        for i, start in zip(chain, rows.observed_from(chain), strict=True):
            observation = out[PROMPTS][i][start:]
            row[RESPONSES] += observation
            row[RESPONSES] += out[RESPONSES][i]
            for name in per_token:
                row[name] += [per_token[name]] * len(observation)
                row[name] += out[name][i]
        for name, values in row.items():
            merged[name].append(values)
    merged[METRICS] = format_metrics(merged, step_wise=True)
    return merged


def _of_last_turns(name: str, value: Any, last: list[int], rows: int) -> Any:
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {k: _of_last_turns(f"{name}.{k}", v, last, rows) for k, v in value.items()}
    if not isinstance(value, list):
        kind = type(value).__name__
        raise MergeError(f"expected a list or a dict of lists, got {kind}", name)
    check_count(len(value), rows, name)
    return [value[i] for i in last]
