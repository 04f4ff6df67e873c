"""Merge a batch of Python lists: SkyRL's GeneratorOutput in and out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from rlskip.merge.chains import Chain, Rows
from rlskip.merge.checks import check_carried, check_mapping, check_rows, trajectories
from rlskip.merge.extras import fold_extra
from rlskip.merge.metrics import format_metrics
from rlskip.merge.turns import IS_LAST, METRICS, PROMPTS, RESPONSES, TRAJECTORIES, token_fields


@attrs.frozen
class ListRows(Rows):
    """Rows as Python lists. Comparing them costs most of a merge.

    A slice would touch every token once more, and again when freed. The tokens of a row that ends
    a chain are therefore kept in a list, which grows by what the next row adds.
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
    """Ends a list, and records whether a comparison reached it."""

    reached = False

    def __eq__(self, other: object) -> bool:
        self.reached = True
        return False

    def __lt__(self, other: object) -> bool:
        return True


def _starts_with(later: list[int], context: list[int]) -> bool:
    """Whether `context` is a prefix of `later`, without copying either."""
    if len(context) >= len(later):
        return context == later
    # The first items that differ decide the order: `end` does if all items before it are equal.
    end = _End()
    context.append(end)  # type: ignore[arg-type]
    _ = context < later
    context.pop()
    return end.reached


def list_rows(out: Mapping[str, Any]) -> Rows:
    """The checked tokens of a list batch."""
    check_mapping(out)
    check_carried([name for name, value in out.items() if value is not None])
    check_rows(out)
    spans = trajectories(out.get(TRAJECTORIES), out.get(IS_LAST))
    return ListRows(out[PROMPTS], out[RESPONSES], spans)


def fold_lists(out: Mapping[str, Any], rows: Rows, chains: list[Chain]) -> dict[str, Any]:
    """One row for each chain of a list batch."""
    per_token = token_fields(out)
    merged: dict[str, Any] = {
        name: fold_extra(name, value, rows, chains)
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
