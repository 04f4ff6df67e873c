"""Merging a packed batch: a TensorDict with jagged fields in, the same out, no lists of tokens.

A jagged field is a nested tensor in layout ``torch.jagged``: the values of all rows end to end,
and the offsets between them. ``.values()`` and ``.offsets()`` give both without a copy,
:func:`torch.nested.nested_tensor_from_jagged` takes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain as flatten
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlskip.merge.chains import Chain, Rows
from rlskip.merge.rows import (
    IS_LAST,
    MASKS,
    PROMPTS,
    RESPONSES,
    TRAJECTORIES,
    MergeError,
    check_carried,
    check_some,
    trajectories,
)


def packed_rows(batch: TensorDictBase) -> Rows:
    """The checked tokens of a packed batch, as views into it.

    Parameters
    ----------
    batch
        On the CPU, one entry a row. `prompt_token_ids`, `response_ids` and `loss_masks` are
        jagged, with integer ids of any width; any other jagged field (`rewards`,
        `rollout_logprobs`, ...) holds one value a response token. All else holds one entry a
        row, among it `trajectory_ids` (integers, or any hashables) and `is_last_step`.

    Raises
    ------
    MergeError
        Naming field and row, for all that the list path refuses.
    """
    check_carried(batch.keys())
    fields = _jagged_fields(batch)
    for name in (PROMPTS, RESPONSES, MASKS):
        if name not in fields:
            raise MergeError("expected a nested tensor in layout torch.jagged", name)
    check_some(batch.batch_size[0])
    expected = _lengths(fields[RESPONSES])
    for name, field in fields.items():
        if field.lengths() is not None:
            raise MergeError("its rows have holes between them", name, "call .contiguous() on it")
        for i, (found, length) in enumerate(zip(_lengths(field), expected, strict=True)):
            if name != PROMPTS and found != length:
                raise MergeError(f"{found} values for {length} response tokens", f"{name}[{i}]")
    spans = trajectories(_entries(batch, TRAJECTORIES), _entries(batch, IS_LAST))
    return Rows(_split(fields[PROMPTS]), _split(fields[RESPONSES]), spans, _same)


def fold_packed(batch: TensorDictBase, rows: Rows, chains: list[Chain]) -> TensorDictBase:
    """One row for each chain of a packed batch, in memory linear in the result.

    What a row holds once is taken from the chain's last turn; what it holds once a token is 0 on
    observations.
    """
    fields = _jagged_fields(batch)
    merged = batch.exclude(*fields)[[chain[-1] for chain in chains]]
    firsts = [rows.prompts[chain[0]] for chain in chains]
    merged[PROMPTS] = _jagged(fields.pop(PROMPTS), firsts, [len(prompt) for prompt in firsts])

    turns = list(flatten.from_iterable(chains))
    starts = flatten.from_iterable(map(rows.observed_from, chains))
    observations = [rows.prompts[i][start:] for i, start in zip(turns, starts, strict=True)]
    lengths = [rows.length(chain[-1]) - len(rows.prompts[chain[0]]) for chain in chains]
    longest = max(map(len, observations))
    for name, field in fields.items():
        values = _split(field)
        seen = observations
        if name != RESPONSES:
            zeros = np.zeros((longest, *values[0].shape[1:]), values[0].dtype)
            seen = [zeros[: len(observation)] for observation in observations]
        pieces = flatten.from_iterable(zip(seen, (values[i] for i in turns), strict=True))
        merged[name] = _jagged(field, list(pieces), lengths)
    return merged


def _jagged_fields(batch: TensorDictBase) -> dict[str, Any]:
    return {
        name: field
        for name, field in batch.items()
        if isinstance(field, Tensor) and field.is_nested and field.layout == torch.jagged
    }


def _lengths(field: Any) -> list[int]:
    lengths: list[int] = field.offsets().diff().tolist()
    return lengths


def _split(field: Any) -> list[np.ndarray]:
    """Each row as a view. bfloat16, unknown to numpy, as its bits: values are only moved."""
    values = field.values()
    array = (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()
    return [array[start:end] for start, end in pairwise(field.offsets().tolist())]


def _jagged(like: Any, pieces: list[np.ndarray], lengths: list[int]) -> Tensor:
    """A field of the same type, from its values in pieces and the lengths of its rows."""
    values = torch.from_numpy(np.concatenate(pieces, dtype=pieces[-1].dtype)).view(like.dtype)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def _entries(batch: TensorDictBase, name: str) -> Sequence[Any] | None:
    values = batch.get(name, None)
    return None if values is None else values.tolist()


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    # numpy compares integers at twice the speed of torch.equal.
    return bool((a == b).all())
