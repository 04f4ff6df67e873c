"""Rows as mappings, and the same rows as one TensorDict.

The tensors of rows may differ in length; a batch holds them as a jagged nested tensor. The rules
are TransferQueue's (0.1.11, `AsyncSimpleStorageManager._pack_field_values`), so that batches of
all queues look the same.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import chain as flatten
from typing import Any

import torch
from tensordict import (
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
)

from rlskip.batch.columns import columns_of, rows_of
from rlskip.queue.protocol import PutError, Row


def to_rows(fields: TensorDictBase | Sequence[Row]) -> list[dict[str, Any]]:
    """One mapping per row; tensors are views into the batch.

    A value for the whole batch (NonTensorData) belongs to every row.

    Raises
    ------
    PutError
        A field is itself a TensorDict or a tensorclass, or the mappings hold different fields.
    """
    rows = rows_of(fields)
    parts = [columns_of(fields)] if isinstance(fields, TensorDictBase) else rows
    for name, value in flatten.from_iterable(part.items() for part in parts):
        if is_tensor_collection(value) and not is_non_tensor(value):
            what = f"field {name!r} is a nested {type(value).__name__}"
            raise PutError(what, remedy="put its fields flat")
    for row in rows:
        if row.keys() != rows[0].keys():
            odd = ", ".join(sorted(row.keys() ^ rows[0].keys()))
            raise PutError(
                f"some rows hold {odd} and some do not",
                remedy="put rows with different fields separately",
            )
    return rows


def to_batch(rows: Sequence[Row]) -> TensorDict:
    """One TensorDict of batch size ``(len(rows),)`` that shares no memory with `rows`.

    All rows must hold the same fields. Scalars are stacked, other tensors become
    one jagged nested tensor (layout ``torch.jagged``; a NonTensorStack where their shapes or
    dtypes do not allow it), anything else a NonTensorStack.
    """
    batch = {name: _pack([row[name] for row in rows]) for name in (rows[0] if rows else ())}
    return TensorDict(batch, batch_size=[len(rows)])


def _pack(values: list[Any]) -> torch.Tensor | NonTensorStack:
    if all(isinstance(value, torch.Tensor) for value in values):
        if all(value.dim() == 0 for value in values):
            return torch.stack(values)
        try:
            return torch.nested.as_nested_tensor(values, layout=torch.jagged)
        except RuntimeError:  # ragged in more than the first dimension, or of several dtypes
            pass
    return NonTensorStack(*copy.deepcopy(values))
