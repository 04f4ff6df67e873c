"""Merge a packed batch: a TensorDict with jagged fields in and out, without lists of tokens.

A jagged field is a nested tensor in layout ``torch.jagged``: the values of all rows in one tensor
(``.values()``), and the offsets of the rows in it (``.offsets()``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain as flatten
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDictBase
from torch import Tensor

from rlskip.batch.columns import is_lazy, select
from rlskip.merge.chains import Chain, Rows
from rlskip.merge.checks import check_carried, check_some, trajectories
from rlskip.merge.lists import fold_extra
from rlskip.merge.turns import IS_LAST, MASKS, PROMPTS, RESPONSES, TRAJECTORIES, MergeError

_IDS = (
    torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def packed_rows(batch: TensorDictBase) -> Rows:
    """The checked tokens of a packed batch, as views into it.

    Parameters
    ----------
    batch
        On the CPU, of batch size ``(rows,)``. `prompt_token_ids`, `response_ids` and `loss_masks`
        are jagged, with integer ids of any width. Any other jagged field (`rewards`,
        `rollout_logprobs`, ...) holds one value per response token, and so do lists and arrays
        that are all as long as their responses. Other fields hold one entry per row, among them
        `trajectory_ids` (integers, or any hashables) and `is_last_step`.

    Raises
    ------
    MergeError
        As for lists; the error names the field and the row.
    """
    if is_lazy(batch) or batch.batch_dims != 1:
        what = f"a {type(batch).__name__} of batch size {tuple(batch.batch_size)}"
        raise MergeError(f"expected a TensorDict of batch size (rows,), got {what}")
    check_carried(batch.keys())
    fields = _jagged_fields(batch)
    for name in (PROMPTS, RESPONSES, MASKS):
        if name not in fields:
            raise MergeError("expected a nested tensor in layout torch.jagged", name)
    check_some(len(batch))
    for name, field in fields.items():
        _check_jagged(field, name)
    expected = _lengths(fields[RESPONSES])
    for name, field in fields.items():
        for i, (found, length) in enumerate(zip(_lengths(field), expected, strict=True)):
            if name != PROMPTS and found != length:
                raise MergeError(f"{found} values for {length} response tokens", f"{name}[{i}]")
    _check_width(fields[PROMPTS].values().numpy(), fields[RESPONSES].values().numpy())
    spans = trajectories(_entries(batch, TRAJECTORIES), _entries(batch, IS_LAST))
    return Rows(_split(fields[PROMPTS]), _split(fields[RESPONSES]), spans, _same)


def _check_jagged(field: Any, name: str) -> None:
    """Refuse a jagged field that cannot be merged as a view into its values."""
    values = field.values()
    if values.device.type != "cpu":
        raise MergeError(f"it is on {values.device}", name, "call .cpu() on it")
    if values.requires_grad:
        raise MergeError("merging keeps no gradients", name, "call .detach() on it")
    if field.lengths() is not None:
        raise MergeError("there are gaps between its rows", name, "call .contiguous() on it")
    if isinstance(field.size(1), int):  # a ragged dimension has a symbolic size
        raise MergeError("its rows must vary in length in their first dimension", name)
    if name in (PROMPTS, RESPONSES) and (values.dim() > 1 or values.dtype not in _IDS):
        raise MergeError(f"expected integer ids, got {values.dtype} of {values.dim()}-d rows", name)


def _check_width(prompts: np.ndarray, responses: np.ndarray) -> None:
    """Refuse prompts whose ids do not fit into the responses, which take in parts of them."""
    if prompts.size and not np.can_cast(prompts.dtype, responses.dtype):
        fits = np.iinfo(responses.dtype)
        if not fits.min <= prompts.min() <= prompts.max() <= fits.max:
            what = f"some ids do not fit into the {responses.dtype} of {RESPONSES}"
            raise MergeError(what, PROMPTS)


def fold_packed(batch: TensorDictBase, rows: Rows, chains: list[Chain]) -> TensorDictBase:
    """One row for each chain of a packed batch, in memory linear in the result.

    Values per row are the last turn's; values per token are 0 for observations. Fields that are no
    tensors are folded as those of lists.
    """
    fields = _jagged_fields(batch)
    fields |= _nested_fields(batch, _lengths(fields[RESPONSES]))
    merged = select(batch.exclude(*fields), [chain[-1] for chain in chains])
    for name, column in batch.items():
        if isinstance(column, NonTensorStack):
            merged[name] = NonTensorStack(*fold_extra(name, column.tolist(), rows, chains))
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
        parts = flatten.from_iterable(zip(seen, (values[i] for i in turns), strict=True))
        merged[name] = _jagged(field, list(parts), lengths)
    return merged


def _jagged_fields(batch: TensorDictBase) -> dict[str, Any]:
    nested = {n: f for n, f in batch.items() if isinstance(f, Tensor) and f.is_nested}
    for name, field in nested.items():
        if field.layout != torch.jagged:
            raise MergeError("expected a nested tensor in layout torch.jagged", name)
    return nested


def _nested_fields(batch: TensorDictBase, lengths: list[int]) -> dict[Any, Any]:
    """The jagged fields of TensorDicts within a batch that have one value per response token."""
    found: dict[Any, Any] = {
        name: field
        for name, field in batch.items(include_nested=True, leaves_only=True)
        if isinstance(name, tuple) and isinstance(field, Tensor)
        if field.is_nested and field.layout == torch.jagged and _lengths(field) == lengths
    }
    for name, field in found.items():
        _check_jagged(field, ".".join(name))
    return found


def _lengths(field: Any) -> list[int]:
    lengths: list[int] = field.offsets().diff().tolist()
    return lengths


def _split(field: Any) -> list[np.ndarray]:
    """Each row as a view."""
    array = _as_numpy(field.values())
    return [array[start:end] for start, end in pairwise(field.offsets().tolist())]


def _as_numpy(values: Tensor) -> np.ndarray:
    """The values as an array, of integers with the same bits for dtypes that numpy lacks."""
    try:
        return values.numpy()
    except TypeError:
        return values.view(_SAME_SIZE[values.dtype.itemsize]).numpy()


def _jagged(like: Any, parts: list[np.ndarray], lengths: list[int]) -> Tensor:
    """A field of the same type, from parts of its values and the lengths of its rows."""
    flat = np.concatenate(parts, dtype=parts[-1].dtype, casting="unsafe")  # see _check_width
    values = torch.from_numpy(flat).view(like.dtype)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def _entries(batch: TensorDictBase, name: str) -> Sequence[Any] | None:
    values = batch.get(name, None)
    if isinstance(values, Tensor) and (values.is_nested or values.is_meta):
        raise MergeError("expected one value per row", name)
    return None if values is None else values.tolist()


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    # numpy compares integers twice as fast as torch.equal.
    return bool((a == b).all())
