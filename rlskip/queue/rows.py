"""Rows as mappings, and the same rows as one TensorDict.

A row's tensors have lengths of their own; a batch holds them as a jagged nested tensor. The
rules are TransferQueue's (0.1.11, `AsyncSimpleStorageManager._pack_field_values`), so that a
batch looks the same from whichever queue it comes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_tensor_collection

from rlskip.queue.base import PutError, Row


def to_rows(fields: TensorDict | Sequence[Row]) -> list[dict[str, Any]]:
    """One mapping per row; tensors are views into the batch.

    A batch-wide value (NonTensorData) belongs to every row.

    Raises
    ------
    PutError
        A field is itself a TensorDict, or the mappings hold different fields.
    """
    if not isinstance(fields, TensorDict):
        for row in fields:
            if row.keys() != fields[0].keys():
                odd = ", ".join(sorted(row.keys() ^ fields[0].keys()))
                raise PutError(f"some rows hold {odd} and some do not", remedy="put them apart")
        return [dict(row) for row in fields]
    columns = {name: _column(name, value) for name, value in fields.items()}
    return [{name: column[i] for name, column in columns.items()} for i in range(len(fields))]


def to_batch(rows: Sequence[Row]) -> TensorDict:
    """One TensorDict of batch size ``(len(rows),)`` that shares no memory with `rows`.

    All rows must hold the same fields. Scalars are stacked, other tensors become
    one jagged nested tensor (layout ``torch.jagged``; a NonTensorStack where their shapes or
    dtypes do not allow it), anything else a NonTensorStack.
    """
    batch = {name: _pack([row[name] for row in rows]) for name in (rows[0] if rows else ())}
    return TensorDict(batch, batch_size=[len(rows)])


def _column(name: str, value: Any) -> Sequence[Any]:
    if isinstance(value, torch.Tensor):
        return value.unbind(0)
    if isinstance(value, (NonTensorData, NonTensorStack)):
        return list(value.tolist())
    if is_tensor_collection(value):
        raise PutError(f"field {name!r} is a nested TensorDict", remedy="put its fields flat")
    raise PutError(f"field {name!r} is a {type(value).__name__}, which no row can hold")


def _pack(values: list[Any]) -> torch.Tensor | NonTensorStack:
    if all(isinstance(value, torch.Tensor) for value in values):
        if all(value.dim() == 0 for value in values):
            return torch.stack(values)
        try:
            return torch.nested.as_nested_tensor(values, layout=torch.jagged)
        except RuntimeError:  # ragged in more than the first dimension, or of several dtypes
            pass
    return NonTensorStack(*copy.deepcopy(values))
