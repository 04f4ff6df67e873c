"""The one hash of a prompt. That of a batch is made of those of its rows."""

from __future__ import annotations

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
from rlskip.format.codec import Walk
from rlskip.format.fingerprint import (
    NOTES,
    VOLATILE,
    Hasher,
    Path,
    equal_bits,
    explained,
    fingerprint,
    without_volatile,
)

DIGITS = 16
_MASK = "attention_mask"
_NOTHING = Hasher(Walk(), []).hexdigest()


def digests_of(
    prompts: Any, without: Collection[str] = (), neutral: Collection[str] = ()
) -> list[str | None]:
    """A hash of each of the prompts, by the rule of :func:`~rlskip.format.fingerprint.fingerprint`.

    Besides what that leaves out, these do not count: padding, that is, what a column
    ``*attention_mask`` marks in columns as wide as it; fields that are None, and an ``extra_info``
    of which nothing is left; and the layout, a list of mappings or a mapping of columns. A value
    for the whole batch is part of each prompt.

    Parameters
    ----------
    without
        Further fields that do not count.
    neutral
        Names of values for the whole batch that do not.

    Returns
    -------
    list
        16 hexadecimal digits for each prompt; None for one of which nothing is left. What is no
        batch is a single prompt; the items of a list are one each.

    Raises
    ------
    UnsupportedTypeError
        A part of the prompts cannot be compared; the error names its place.
    """
    left_out = VOLATILE.union(without)
    columns = columns_of(prompts)
    if n := length_of(prompts) if columns else 0:
        return _of_columns(columns, n, left_out, neutral)
    if prompts is None:  # of a stage that takes none
        return [fingerprint(None)[:DIGITS]]
    rows = prompts if isinstance(prompts, list | tuple) else [prompts]
    return [
        None if _is_bare(row, left_out) else fingerprint(row, left_out)[:DIGITS] for row in rows
    ]


def digest_of_batch(prompts: Any, digests: Sequence[str]) -> str:
    """The hash of prompts whose hashes are `digests`, in that order."""
    is_batch = isinstance(prompts, list | tuple) or bool(columns_of(prompts))
    text = f"{'batch' if is_batch else 'one'} {' '.join(digests)}"
    return xxhash.xxh3_128_hexdigest(text.encode())


def _is_bare(row: Any, left_out: Collection[str]) -> bool:
    """Whether nothing of a row counts."""
    fields = columns_of(row) if is_data_proto(row) else row
    return fields is None or (
        isinstance(fields, Mapping)
        and all(name in left_out or value is None for name, value in fields.items())
    )


def _of_columns(
    columns: Mapping[Any, Any], n: int, left_out: Collection[str], neutral: Collection[str]
) -> list[str | None]:
    path: Path = []
    rows = [Hasher(Walk(), path) for _ in range(n)]
    masks = [column for name, column in columns.items() if str(name).endswith(_MASK)]
    masks = [mask for mask in masks if _is_table(mask, n)]
    with explained(path, columns):
        for name in sorted(columns.keys() - left_out, key=str):
            column = columns[name]
            if column is None:
                continue
            if _is_table(column, n):
                mask = next((m for m in masks if m.shape == (n, column.shape[-1])), None)
                _feed_table(rows, name, column, mask)
                continue
            cells = cells_of(column, n)
            if cells is None:
                if name in neutral or column_length(column) == 0:
                    continue
                of_all = Hasher(Walk(), path)
                of_all.feed_part(name, unwrapped(column))
                cells = [of_all.hexdigest()] * n
            path.append((name, column))
            for i, (row, cell) in enumerate(zip(rows, cells, strict=True)):
                if name == NOTES:
                    cell = without_volatile(VOLATILE, cell)
                is_left = not (name == NOTES and isinstance(cell, dict) and not cell)
                if cell is not None and is_left:
                    row.put(f"field {name}")
                    row.feed_part(i, cell)
            path.pop()
    digests = [row.hexdigest() for row in rows]
    return [None if digest == _NOTHING else digest[:DIGITS] for digest in digests]


def _is_table(column: Any, n: int) -> bool:
    if not is_tensor(column) or column.is_nested:
        return False
    from rlskip.format.torch_maker import is_plain

    return column.ndim > 1 and len(column) == n and is_plain(column)


def _feed_table(rows: Sequence[Hasher], name: Any, column: Any, mask: Any) -> None:
    """Feed each row of a tensor as that row alone would be; what is padding in it is left out.

    One tensor is brought to the host and split, because a thousand small ones take far longer.
    """
    from rlskip.format.torch_maker import flat_bytes

    dtype = str(column.dtype).removeprefix("torch.")
    items = equal_bits(flat_bytes(column), dtype).reshape(*column.shape, column.element_size())
    real = None if mask is None else mask.detach().cpu().numpy() != 0
    for i, (row, part) in enumerate(zip(rows, items, strict=True)):
        if real is not None and not real[i].all():
            part = np.compress(real[i], part, axis=-2)
        row.put(f"field {name}")
        row.put(f"array {dtype} {[*part.shape[:-1]]}", part.reshape(-1))
