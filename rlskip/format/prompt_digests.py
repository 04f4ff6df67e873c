"""The one hash of a prompt. That of a batch is made of those of its rows."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from rlskip.batch.columns import (
    cells_of,
    column_length,
    columns_of,
    is_data_proto,
    is_tensor,
    length_of,
    unwrapped,
)
from rlskip.format.fingerprint import NOTES, VOLATILE, fingerprint, row_texts, without_volatile

DIGITS = 16


def digests_of(
    prompts: Any, without: Collection[str] = (), neutral: Collection[str] = ()
) -> list[str | None]:
    """A hash of each of the prompts: the :func:`~rlskip.format.fingerprint.fingerprint` of its row.

    They are 16 hexadecimal digits, or None for a prompt of which nothing is left. What is not a
    batch is a single prompt; the items of a list are one each.

    Besides what a fingerprint leaves out, these do not count: padding, that is, what a column
    ``*attention_mask`` marks in columns as wide as it; fields that are None, and an ``extra_info``
    of which nothing is left; the layout; and the fields `without`. A value for the whole batch is
    part of each prompt, unless its name is `neutral`. Raises as `fingerprint` does.
    """
    if prompts is None:  # of a stage that takes none
        return [fingerprint(None)[:DIGITS]]
    left_out = VOLATILE.union(without)
    columns = columns_of(prompts)
    if n := length_of(prompts) if columns else 0:
        counted = {name: column for name, column in columns.items() if name not in left_out}
        rows: Sequence[Any] = _rows_of(counted, n, neutral)
    else:
        rows = prompts if isinstance(prompts, list | tuple) else [prompts]
    return [_digest_of(row, left_out) for row in rows]


def digest_of_batch(prompts: Any, digests: Sequence[str]) -> str:
    """The hash of prompts whose hashes are `digests`, in that order."""
    is_batch = isinstance(prompts, list | tuple) or bool(columns_of(prompts))
    text = f"{'batch' if is_batch else 'one'} {' '.join(digests)}"
    return xxhash.xxh3_128_hexdigest(text.encode())


def _digest_of(row: Any, left_out: Collection[str]) -> str | None:
    if isinstance(row, Mapping) or is_data_proto(row):
        counted = columns_of(row).items()
        row = {k: value for k, value in counted if k not in left_out and value is not None}
        if NOTES in row:
            notes = row[NOTES] = without_volatile(VOLATILE, row[NOTES])
            if isinstance(notes, dict) and not notes:
                del row[NOTES]
    is_bare = row is None or (isinstance(row, dict) and not row)
    return None if is_bare else fingerprint(row, None)[:DIGITS]


def _rows_of(columns: dict[Any, Any], n: int, neutral: Collection[str]) -> list[dict[Any, Any]]:
    rows: list[dict[Any, Any]] = [{} for _ in range(n)]
    for name, column in columns.items():
        # As one array, because a thousand small tensors take far longer to hash.
        if is_tensor(column) and not column.is_nested:
            with contextlib.suppress(TypeError, RuntimeError):  # what numpy lacks stays as it is
                columns[name] = column.numpy(force=True)
    for name, column in columns.items():
        cells = cells_of(column, n)
        if cells is None:
            if name in neutral or column is None or column_length(column) == 0:
                continue
            # Hashed once, not for each row.
            cells = [fingerprint({name: unwrapped(column)}, None)] * n
        elif isinstance(column, np.ndarray) and column.ndim > 1:
            shape = (n, column.shape[-1])
            masks = (columns[one] for one in columns if str(one).endswith("attention_mask"))
            mask = next((one for one in masks if getattr(one, "shape", None) == shape), None)
            real = None if mask is None or mask.all() else mask != 0
            if (texts := row_texts(column, real)) is not None:
                cells = texts
            elif real is not None:
                cells = [cell[..., some] for cell, some in zip(column, real, strict=True)]
        for row, cell in zip(rows, cells, strict=True):
            row[name] = cell
    return rows
