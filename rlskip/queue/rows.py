"""Rows as mappings, and the same rows as one TensorDict.

The tensors of rows may differ in length; a batch holds them as a jagged nested tensor. The rules
are TransferQueue's (0.1.11, `AsyncSimpleStorageManager._pack_field_values`), so that batches of
all queues look the same.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import (
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
)

from rlskip.batch.columns import columns_of, rows_of
from rlskip.keys import split_trajectory
from rlskip.queue.protocol import MissingKeysError, PutError, Row, UnequalFieldsError


class OwnRow(dict[str, Any]):
    """A row that shares no memory with anything: a queue of this process need not copy it."""


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
    for name, value in itertools.chain.from_iterable(part.items() for part in parts):
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


def one_batch(
    rows: Mapping[str, Row],
    partition: str,
    fill_missing: bool = False,
    *,
    fields: Sequence[str] | None = None,
    own: bool = False,
) -> TensorDict:
    """These `fields`, or all, of rows by key as one batch: every reader's rule for unequal rows.

    A field that some rows lack is an error (:func:`check_fields`). With `fill_missing` it is None
    there, unless any row holds a tensor or an array under its name: a missing tensor has no None.
    `own` is that of :func:`to_batch`.
    """
    filled: set[str] = set()
    if fill_missing:
        items = list(itertools.chain.from_iterable(row.items() for row in rows.values()))
        dense = {name for name, value in items if isinstance(value, (torch.Tensor, np.ndarray))}
        filled = {name for name, _ in items} - dense
    names = check_fields(rows, partition, fields, filled)
    return to_batch([{name: row.get(name) for name in names} for row in rows.values()], own=own)


def check_fields(
    rows: Mapping[str, Collection[str]],
    partition: str,
    fields: Sequence[str] | None = None,
    filled: Collection[str] = (),
) -> list[str]:
    """The fields of a batch of rows, each of which has these names of fields, by key.

    Raises
    ------
    MissingKeysError
        A row holds nothing.
    UnequalFieldsError
        A field that is not `filled` is not in every row. The error names the field that the fewest
        rows lack, and one of these rows: it is the row to look at.
    """
    where = f"partition {partition!r}"
    if empty := [key for key, names in rows.items() if not names]:
        raise MissingKeysError(f"{', '.join(map(repr, empty[:10]))}: no field is there", where)
    counts = Counter(itertools.chain.from_iterable(rows.values()))
    wanted = list(counts if fields is None else fields)
    lacked = [name for name in wanted if counts[name] < len(rows) and name not in filled]
    if lacked:
        field = max(lacked, key=counts.__getitem__)
        lacking = [key for key, names in rows.items() if field not in names]
        form = split_trajectory(lacking[0])
        who = f" (session {form[1]} of prompt {form[0]!r})" if form else ""
        more = f", and so do {len(lacking) - 1} more" if len(lacking) > 1 else ""
        held = ", ".join(name for name, count in counts.items() if count == len(rows)) or "none"
        raise UnequalFieldsError(
            f"the rows do not hold the same fields: {lacking[0]!r}{who} lacks {field!r}{more}",
            where,
            f"return the same fields from every session, or read those that all rows hold: {held}",
        )
    return wanted


def to_batch(rows: Sequence[Row], *, own: bool = False) -> TensorDict:
    """One TensorDict of batch size ``(len(rows),)`` that shares no memory with `rows`.

    All rows must hold the same fields. Scalars are stacked, other tensors become one jagged nested
    tensor (a NonTensorStack where their shapes or dtypes do not allow it), anything else a
    NonTensorStack. `own`: nobody else has the rows, so only tensors are copied.
    """
    names = rows[0] if rows else ()
    batch = {name: _pack([row[name] for row in rows], own) for name in names}
    return TensorDict(batch, batch_size=[len(rows)])


def _pack(values: list[Any], own: bool) -> torch.Tensor | NonTensorStack:
    if all(isinstance(value, torch.Tensor) for value in values):
        if all(value.dim() == 0 for value in values):
            return torch.stack(values)
        try:
            return torch.nested.as_nested_tensor(values, layout=torch.jagged)
        except RuntimeError:  # ragged in more than the first dimension, or of several dtypes
            pass
    return NonTensorStack(*(values if own else copy.deepcopy(values)))
