"""The fields of a list batch that are not the format's own: one entry a row, or a value a token."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain as flatten
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from rlskip.merge.chains import Chain, Rows
from rlskip.merge.checks import is_mapping
from rlskip.merge.turns import NUMBER, MergeError


def fold_extra(name: str, value: Any, rows: Rows, chains: list[Chain]) -> Any:
    """The field of the merged rows: the last turns' entries.

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
