"""Both layouts of a batch: SkyRL's GeneratorOutput, a dict of lists, and packed ones.

A packed batch is a TensorDict with jagged fields: nested tensors in layout ``torch.jagged``, the
values of all rows in one tensor (``.values()``), and the offsets of the rows in it.

Both are linked as arrays. Of a list, ``array.fromlist`` makes one in a third of the time in which
``numpy.fromiter`` does, and faster than two lists are compared.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain as flatten
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDictBase
from torch import Tensor

from rlskip.batch.columns import is_lazy, select
from rlskip.batch.ragged import NUMBER
from rlskip.merge import turns
from rlskip.merge.chains import Chain, Rows
from rlskip.merge.generator_outputs import format_metrics
from rlskip.merge.turns import (
    IS_LAST,
    MASKS,
    METRICS,
    PROMPTS,
    RESPONSES,
    TRAJECTORIES,
    expect,
)

_IDS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32)


def list_rows(out: Mapping[str, Any]) -> Rows:
    """The checked tokens of a list batch."""
    turns.expect_a(dict, out)
    turns.check_carried([name for name, value in out.items() if value is not None])
    turns.check_rows(out)
    spans = turns.trajectories(out.get(TRAJECTORIES), out.get(IS_LAST))
    prompts, responses = ([*map(_ids, out[name])] for name in (PROMPTS, RESPONSES))
    return Rows(prompts, responses, spans)


def _ids(row: list[int]) -> np.ndarray:
    """The ids of a row as an array, of which any is refused that is not an integer of 64 bits."""
    try:
        ids = array("I")
        ids.fromlist(row)
    except OverflowError:  # negative, or wide
        ids = array("q")
        ids.fromlist(row)
    return np.asarray(ids)


def fold_lists(out: Mapping[str, Any], rows: Rows, chains: list[Chain]) -> dict[str, Any]:
    """One row for each chain of a list batch."""
    own = (PROMPTS, RESPONSES, METRICS)
    merged = {n: fold(n, value, rows, chains) for n, value in out.items() if n not in own}
    merged[PROMPTS] = [list(out[PROMPTS][chain[0]]) for chain in chains]
    merged[RESPONSES] = []
    for chain in chains:
        said: list[int] = []
        for i, start in rows.turns(chain):
            said += out[PROMPTS][i][start:]
            said += out[RESPONSES][i]
        merged[RESPONSES].append(said)
    merged[METRICS] = format_metrics(merged, step_wise=True)
    return merged


def fold(name: str, value: Any, rows: Rows, chains: list[Chain]) -> Any:
    """A field of the merged rows besides their tokens: the last turns' entries.

    Entries that are as long as their responses have one value per token: they are joined, with 0
    for observations. Raises MergeError where they are not lists of numbers.
    """
    if isinstance(value, Mapping):
        return {key: fold(f"{name}.{key}", v, rows, chains) for key, v in value.items()}
    if value is None:
        return None
    lengths = [len(response) for response in rows.responses]
    if (any(lengths) or name in turns.PER_TOKEN) and list(map(_length, value)) == lengths:
        own = turns.PER_TOKEN.get(name)  # see naming_odd_tokens
        types = {own} if own else {*map(type, flatten.from_iterable(value))}
        are_lists = all(isinstance(entry, list | tuple) for entry in value)
        if are_lists and all(issubclass(one, NUMBER) for one in types):
            zero = 0.0 if any(issubclass(one, float | np.floating) for one in types) else 0
            return [_joined(value, zero, rows, chain) for chain in chains]
        expect(
            # Entries of one length may have it by chance.
            len({*lengths}) == 1 or all(len(chain) == 1 for chain in chains),
            "it has values per token that are not lists of numbers",
            name,
            "give lists, drop it, or train these rows unmerged (merge.stepwise_output=false)",
        )
    return [value[chain[-1]] for chain in chains]


def _length(entry: Any) -> int | None:
    """How many values an entry has; None of one that is a value itself."""
    is_sequence = isinstance(entry, list | tuple | np.ndarray | Tensor)
    return len(entry) if is_sequence and getattr(entry, "ndim", True) else None


def _joined(entries: list[Any], zero: float, rows: Rows, chain: Chain) -> Sequence[Any]:
    """The entries of a chain's rows, with zeros for the observations."""
    joined: list[Any] = []
    for i, start in rows.turns(chain):
        joined += [zero] * (len(rows.prompts[i]) - start)
        joined += entries[i]
    return joined if isinstance(entries[0], list) else tuple(joined)


# -- packed batches ------------------------------------------------------------------------------


def packed_rows(batch: TensorDictBase) -> Rows:
    """The checked tokens of a packed batch, as views into it; raises MergeError as for lists.

    The batch is on the CPU, of batch size ``(rows,)``. `prompt_token_ids`, `response_ids` and
    `loss_masks` are jagged, with integer ids of any width. Any other jagged field holds one value
    per response token, and so do lists that are all as long as their responses. Other fields hold
    one entry per row, among them `trajectory_ids` and `is_last_step`.
    """
    what = f"expected a TensorDict of batch size (rows,), got a {type(batch).__name__}"
    is_flat = not is_lazy(batch) and batch.batch_dims == 1
    expect(is_flat, f"{what} of batch size {tuple(batch.batch_size)}")
    turns.check_carried(batch.keys())
    fields = {name: f for name, f in batch.items() if isinstance(f, Tensor) and f.is_nested}
    for name in dict.fromkeys((PROMPTS, RESPONSES, MASKS, *fields)):
        is_jagged = name in fields and fields[name].layout == torch.jagged
        expect(is_jagged, "expected a nested tensor in layout torch.jagged", name)
    turns.check_count(len(batch), len(batch), RESPONSES)
    for name, field in fields.items():
        _check_jagged(field, name)
        if name != PROMPTS:
            turns.check_tokens(_lengths(field), _lengths(fields[RESPONSES]), name)
    prompts, responses = (
        _split(fields[name].values().numpy(), fields[name]) for name in (PROMPTS, RESPONSES)
    )
    spans = turns.trajectories(_entries(batch, TRAJECTORIES), _entries(batch, IS_LAST))
    return Rows(prompts, responses, spans)


def _check_jagged(field: Any, name: str) -> None:
    """Refuse a jagged field that cannot be merged as a view into its values."""
    values = field.values()
    expect(values.device.type == "cpu", f"it is on {values.device}", name, "call .cpu() on it")
    expect(not values.requires_grad, "it has a gradient", name, "call .detach() on it")
    expect(field.lengths() is None, "its rows have gaps", name, "call .contiguous() on it")
    # A ragged dimension has a symbolic size.
    ragged = "its rows must vary in length in their first dimension"
    expect(not isinstance(field.size(1), int), ragged, name)
    if name in (PROMPTS, RESPONSES):
        what = f"expected integer ids, got {values.dtype} of {values.dim()}-d rows"
        expect(values.dim() == 1 and values.dtype in _IDS, what, name)


def fold_packed(batch: TensorDictBase, rows: Rows, chains: list[Chain]) -> TensorDictBase:
    """One row for each chain of a packed batch, in memory linear in the result.

    Fields that are not tensors are folded as those of lists. Response ids have the wider dtype.
    """
    fields = _per_token(batch, _lengths(batch[RESPONSES]))
    merged = select(batch.exclude(PROMPTS, RESPONSES, *fields), [chain[-1] for chain in chains])
    for name, column in batch.items():
        if isinstance(column, NonTensorStack):
            merged[name] = NonTensorStack(*fold(name, column.tolist(), rows, chains))
    firsts = [rows.prompts[chain[0]] for chain in chains]
    merged[PROMPTS] = _jagged(torch.from_numpy(np.concatenate(firsts)), list(map(len, firsts)))
    every = [turn for chain in chains for turn in rows.turns(chain)]
    said = [part for i, at in every for part in (rows.prompts[i][at:], rows.responses[i])]
    lengths = [rows.length(chain[-1]) - len(rows.prompts[chain[0]]) for chain in chains]
    merged[RESPONSES] = _jagged(torch.from_numpy(np.concatenate(said)), lengths)
    for name, field in fields.items():
        values = field.values()
        # As bytes: numpy puts views together faster than torch, and lacks some dtypes.
        width = math.prod(values.shape[1:]) * values.element_size()
        dense = values.resolve_conj().resolve_neg().contiguous()
        # torch calls an empty tensor and one of a single element contiguous whatever its strides.
        raw = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
        parts = _split(raw.numpy().reshape(len(values), width), field)
        zeros = np.zeros((max(map(len, said[::2])), width), np.uint8)
        both = [
            p
            for (i, _), seen in zip(every, said[::2], strict=True)
            for p in (zeros[: len(seen)], parts[i])
        ]
        flat = torch.from_numpy(np.concatenate(both).reshape(-1)).view(values.dtype)
        merged[name] = _jagged(flat.view(sum(lengths), *values.shape[1:]), lengths)
    return merged


def _per_token(batch: TensorDictBase, lengths: list[int]) -> dict[Any, Any]:
    """The jagged fields that have one value per response token, those of TensorDicts within too."""
    found: dict[Any, Any] = {
        name: field
        for name, field in batch.items(include_nested=True, leaves_only=True)
        if isinstance(field, Tensor) and field.is_nested and field.layout == torch.jagged
        if name not in (PROMPTS, RESPONSES) and _lengths(field) == lengths
    }
    for name, field in found.items():
        _check_jagged(field, name if isinstance(name, str) else ".".join(name))
    return found


def _lengths(field: Any) -> list[int]:
    lengths: list[int] = field.offsets().diff().tolist()
    return lengths


def _split(values: np.ndarray, field: Any) -> list[np.ndarray]:
    """Each row of a field as a view of its values."""
    return [values[start:end] for start, end in pairwise(field.offsets().tolist())]


def _jagged(values: Tensor, lengths: list[int]) -> Tensor:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def _entries(batch: TensorDictBase, name: str) -> Sequence[Any] | None:
    values = batch.get(name, None)
    expect(not getattr(values, "is_nested", False), "expected one value per row", name)
    return None if values is None else values.tolist()
