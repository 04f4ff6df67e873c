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


def check_fields(
    rows: Mapping[str, Collection[str]], where: str, only: Collection[str] | None = None
) -> None:
    """Refuse rows that cannot be one batch: each must hold the fields of all others.

    `rows` has the names of the fields of each, by key; `only` these count, None: all. The error
    names the field that the fewest rows lack, and one of these rows: it is the row to look at.
    """
    first = set(next(iter(rows.values()), ()))
    if first and all(
        len(names) == len(first) and first.issuperset(names) for names in rows.values()
    ):
        return  # as nearly always
    empty = [key for key, names in rows.items() if not names]
    if empty and only is None:
        raise MissingKeysError(f"{', '.join(map(repr, empty[:10]))}: no field is there", where)
    every = itertools.chain.from_iterable(rows.values())
    counts = Counter(name for name in every if only is None or name in only)
    lacked = {name: count for name, count in counts.items() if count < len(rows)}
    if not lacked:
        return
    field = max(lacked, key=lambda name: lacked[name])
    lacking = [key for key, names in rows.items() if field not in names]
    form = split_trajectory(lacking[0])
    who = f" (session {form[1]} of prompt {form[0]!r})" if form else ""
    more = f", and so do {len(lacking) - 1} more" if len(lacking) > 1 else ""
    held = ", ".join(name for name in counts if name not in lacked)
    raise UnequalFieldsError(
        f"the rows do not hold the same fields: {lacking[0]!r}{who} lacks {field!r}{more}",
        where,
        "return the same fields from every session, or read those that all rows hold: "
        f"{held or 'none'}",
    )


def one_batch(
    rows: Mapping[str, Row], partition: str, fill_missing: bool = False, *, own: bool = False
) -> TensorDict:
    """Rows by key as one batch: the rule of every reader for fields that some rows lack.

    Such a field is an error (:func:`check_fields`). With `fill_missing` it is None there, unless
    any row holds a tensor or an array under its name: a missing tensor has no None. `own` is that
    of :func:`to_batch`.
    """
    where = f"partition {partition!r}"
    if not fill_missing:
        check_fields(rows, where)
        return to_batch(list(rows.values()), own=own)
    names = dict.fromkeys(name for row in rows.values() for name in row)
    dense = {
        name
        for row in rows.values()
        for name, value in row.items()
        if isinstance(value, (torch.Tensor, np.ndarray))
    }
    check_fields(rows, where, dense)
    filled = [{name: row.get(name) for name in names} for row in rows.values()]
    return to_batch(filled, own=own)


def to_batch(rows: Sequence[Row], *, own: bool = False) -> TensorDict:
    """One TensorDict of batch size ``(len(rows),)`` that shares no memory with `rows`.

    All rows must hold the same fields. Scalars are stacked, other tensors become
    one jagged nested tensor (layout ``torch.jagged``; a NonTensorStack where their shapes or
    dtypes do not allow it), anything else a NonTensorStack. `own`: nobody else has the rows, so
    only tensors are copied.
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
