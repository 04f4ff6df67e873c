"""The rows that `pack` reads: the tokens that exist, and which of them are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlskip.merge.turns import MergeError

INPUT_IDS = "input_ids"
ATTENTION_MASK = "attention_mask"
LOSS_MASK = "loss_mask"
_FIELDS = (INPUT_IDS, ATTENTION_MASK, LOSS_MASK)


class TokenRows(NamedTuple):
    """The tokens of all rows, one row after the other."""

    ids: np.ndarray  # int64 [tokens]
    trained: np.ndarray  # bool [tokens]: the loss uses the log-probability of this token
    offsets: np.ndarray  # int64 [rows + 1]


def token_rows(rows: Any) -> TokenRows:
    """Read rows of tokens, as :func:`~rlskip.merge.pack` takes them.

    Raises
    ------
    MergeError
        A row without a token, ids that are no integers from 0 to 2**31 - 1, or a mask of
        another shape than the ids. The error names the field and the row.
    """
    fields = _fields(rows)
    ids, lengths = _flat(fields[INPUT_IDS], INPUT_IDS)
    if ids.dtype.kind not in "iu":
        raise MergeError(f"expected integer ids, got {ids.dtype}", INPUT_IDS)
    if ids.size and not 0 <= ids.min() <= ids.max() < 2**31:
        raise MergeError("expected ids from 0 to 2**31 - 1", INPUT_IDS)
    trained = np.ones(len(ids), bool)
    for name in (ATTENTION_MASK, LOSS_MASK):
        if name in fields:
            mask, found = _flat(fields[name], name)
            if not np.array_equal(found, lengths):
                raise MergeError(f"its shape differs from that of {INPUT_IDS}", name)
            if name == LOSS_MASK:
                trained = mask != 0
            else:
                exists = mask != 0
    if ATTENTION_MASK in fields:
        row_of = np.repeat(np.arange(len(lengths)), lengths)
        lengths = np.bincount(row_of[exists], minlength=len(lengths))
        ids, trained = ids[exists], trained[exists]
    for row in np.flatnonzero(lengths == 0):
        raise MergeError("there is no token", f"{INPUT_IDS}[{row}]")
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return TokenRows(ids.astype(np.int64, copy=False), trained, offsets)


def _fields(rows: Any) -> dict[str, Any]:
    """The fields that are there, by name."""
    if not (isinstance(rows, Mapping) or hasattr(rows, "batch_size")):
        return {INPUT_IDS: rows}
    found = {name: rows[name] for name in _FIELDS if name in rows.keys()}  # noqa: SIM118
    fields = {name: field for name, field in found.items() if field is not None}
    if INPUT_IDS not in fields:
        raise MergeError("it is missing", INPUT_IDS, f"give a mapping of {', '.join(_FIELDS)}")
    return fields


def _flat(field: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    """All values of a field, and the length of each row."""
    if getattr(field, "is_nested", False):
        if field.layout != torch.jagged or field.lengths() is not None:
            raise MergeError("expected a contiguous nested tensor in layout torch.jagged", name)
        return _numpy(field.values()), _numpy(field.offsets().diff())
    if isinstance(field, Tensor | np.ndarray):
        if field.ndim != 2:
            raise MergeError(f"expected the shape (rows, width), got {tuple(field.shape)}", name)
        table = _numpy(field) if isinstance(field, Tensor) else field
        return table.reshape(-1), np.full(table.shape[0], table.shape[1])
    parts = [_row(row, f"{name}[{i}]") for i, row in enumerate(field)]
    lengths = np.array([len(part) for part in parts], np.int64)
    return (np.concatenate(parts) if parts else np.empty(0, np.int64)), lengths


def _row(row: Sequence[int] | Tensor | np.ndarray, where: str) -> np.ndarray:
    array = _numpy(row) if isinstance(row, Tensor) else np.asarray(row)
    if array.ndim != 1:
        raise MergeError(f"expected a row of numbers, got the shape {array.shape}", where)
    # An empty list is an array of floats.
    return array if array.size else array.astype(np.int64)


def _numpy(values: Tensor) -> np.ndarray:
    values = values.detach().cpu()
    return (values.float() if values.is_floating_point() else values).numpy()
