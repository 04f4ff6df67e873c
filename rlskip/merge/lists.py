"""Merge a batch of Python lists: SkyRL's GeneratorOutput in and out.

Lists are walked as they are. As jagged tensors at the edge they would be one layout with packed
batches, but making those alone takes 13 ns for each id (``numpy.fromiter``, the fastest way), where
SkyRL's whole merge takes 17 and this one 12.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain as flatten
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from rlskip.merge.chains import Chain, Rows
from rlskip.merge.checks import (
    check_carried,
    check_mapping,
    check_rows,
    is_mapping,
    trajectories,
)
from rlskip.merge.generator_outputs import format_metrics
from rlskip.merge.turns import (
    IS_LAST,
    METRICS,
    NUMBER,
    PROMPTS,
    RESPONSES,
    TRAJECTORIES,
    MergeError,
    token_fields,
)


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


def fold_extra(name: str, value: Any, rows: Rows, chains: list[Chain]) -> Any:
    """A field of the merged rows that is not the format's own: the last turns' entries.

    Of a field whose entries are as long as their responses, these have one value per token: the
    last turn's alone would not fit the merged response. Observations get 0.

    Raises
    ------
    MergeError
        Such values are of no kind that can be put together.
    """
    if is_mapping(value):
        return {key: fold_extra(f"{name}.{key}", v, rows, chains) for key, v in value.items()}
    if value is None:
        return None
    lengths = [len(response) for response in rows.responses]
    if any(lengths) and [_length(entry) for entry in value] == lengths:
        if (kind := _kind_of(value)) is not None:
            return [_joined(value, kind, rows, chain) for chain in chains]
        # Entries of one length may have it by chance.
        if len(set(lengths)) > 1 and any(len(chain) > 1 for chain in chains):
            raise MergeError(
                "its values per token are neither numbers nor arrays of one kind",
                name,
                "drop it, or train these rows unmerged (merge.stepwise_output=false)",
            )
    return [value[chain[-1]] for chain in chains]


def _length(entry: Any) -> int | None:
    """How many values an entry has; None of one that is a value itself."""
    if isinstance(entry, np.ndarray | Tensor):
        return len(entry) if entry.ndim else None
    return len(entry) if isinstance(entry, list | tuple) else None


@attrs.frozen
class _Kind:
    """How entries of one kind are put together, and what the tokens of an observation have."""

    zeros: Callable[[int], Any]
    join: Callable[[list[Any]], Any]


def _kind_of(entries: list[Any]) -> _Kind | None:
    """That of lists or tuples of numbers, of arrays, or of tensors; None of anything else."""
    first = entries[0]
    if all(isinstance(entry, list | tuple) for entry in entries):
        kinds = set(map(type, flatten.from_iterable(entries)))
        if not all(issubclass(kind, NUMBER) for kind in kinds):
            return None
        zero = 0.0 if any(issubclass(kind, float | np.floating) for kind in kinds) else 0
        made: Callable[[Iterable[Any]], Any] = tuple if isinstance(first, tuple) else list
        return _Kind(lambda n: [zero] * n, lambda parts: made(flatten.from_iterable(parts)))
    if not all(map(_is_dense, entries)):
        return None
    if len({(isinstance(entry, Tensor), *entry.shape[1:]) for entry in entries}) > 1:
        return None
    inner = first.shape[1:]
    if isinstance(first, Tensor):
        return _Kind(lambda n: first.new_zeros((n, *inner)), torch.cat)
    return _Kind(lambda n: np.zeros((n, *inner), first.dtype), np.concatenate)


def _is_dense(entry: Any) -> bool:
    """Whether an entry is an array or a tensor of numbers in memory."""
    if isinstance(entry, Tensor):
        return entry.layout is torch.strided and not (entry.is_nested or entry.is_quantized)
    return isinstance(entry, np.ndarray) and entry.dtype.kind in "biufc"


def _joined(entries: list[Any], kind: _Kind, rows: Rows, chain: Chain) -> Any:
    """The entries of a chain's rows, with zeros for the observations between them."""
    parts = []
    for i, start in zip(chain, rows.observed_from(chain), strict=True):
        parts += [kind.zeros(len(rows.prompts[i]) - start), entries[i]]
    return kind.join(parts)
