"""The one hash of a prompt. That of a batch is made of those of its rows."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from rlskip.batch.columns import (
    cells_of,
    column_length,
    columns_of,
    is_data_proto,
    length_of,
    unwrapped,
)
from rlskip.format.codec import Walk
from rlskip.format.fingerprint import (
    VOLATILE,
    Hasher,
    Path,
    equal_bits,
    explained,
    fingerprint,
    without_volatile,
)

if TYPE_CHECKING:
    import torch

DIGITS = 16
_MASK = "attention_mask"
_NOTES = "extra_info"


def digests_of(
    prompts: Any, without: Collection[str] = (), neutral: Collection[str] = ()
) -> list[str | None]:
    """A hash of each of the prompts, by the rule of :func:`~rlskip.format.fingerprint.fingerprint`.

    Besides what that leaves out, these do not count: padding, that is, what a column
    ``*attention_mask`` marks in columns as wide as it; fields that are None; and the layout, a list
    of mappings or a mapping of columns. A value for the whole batch is part of each prompt.

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
    hashers = [Hasher(Walk(), path) for _ in range(n)]
    told = [False] * n  # whether anything of a row counts
    masks = []
    for name, column in columns.items():
        if str(name).endswith(_MASK) and _is_table(column, n):
            masks.append(column)
    with explained(path, columns):
        for name in sorted(columns.keys() - left_out, key=str):
            column = columns[name]
            if column is None:
                continue
            if _is_table(column, n):
                real = next((m for m in masks if m.shape == (n, column.shape[-1])), None)
                _feed_table(hashers, str(name), column, real)
                told = [True] * n
                continue
            cells = cells_of(column, n)
            if cells is None:
                if name in neutral or column_length(column) == 0:
                    continue
                of_all = Hasher(Walk(), path)
                of_all.feed_part(name, unwrapped(column))
                cells = [of_all.hexdigest()] * n
            for row, cell in enumerate(cells):
                if cell is None:
                    continue
                if name == _NOTES:
                    cell = without_volatile(VOLATILE, cell)
                    told[row] = told[row] or cell != {}
                else:
                    told[row] = True
                hashers[row].put(f"field {name}")
                path.append((name, column))
                hashers[row].feed_part(row, cell)
                path.pop()
    return [
        hasher.hexdigest()[:DIGITS] if is_told else None
        for hasher, is_told in zip(hashers, told, strict=True)
    ]


def _is_table(column: Any, n: int) -> bool:
    # Who has a tensor has imported torch, which takes longer than all else that doctor does.
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(column, torch.Tensor) or column.is_nested:
        return False
    from rlskip.format.torch_maker import is_plain

    return column.ndim > 1 and len(column) == n and is_plain(column)


def _feed_table(
    hashers: Sequence[Hasher], name: str, column: torch.Tensor, mask: torch.Tensor | None
) -> None:
    """Feed each row of a tensor as that row alone would be; what is padding in it is left out.

    One tensor is brought to the host and split, because a thousand small ones take far longer.
    """
    from rlskip.format.torch_maker import flat_bytes

    data = column.detach().cpu().contiguous()
    dtype = str(data.dtype).removeprefix("torch.")
    rows: Sequence[torch.Tensor] = data.unbind()
    whole = equal_bits(flat_bytes(data), dtype)
    parts = [*whole.reshape(len(data), whole.size // len(data))]
    shapes = [list(data.shape[1:])] * len(data)
    if mask is not None:
        for i, (first, last) in enumerate(_ends(mask)):
            if last - first == data.shape[-1]:
                continue
            if data.ndim == 2 and last >= 0:
                width = len(parts[i]) // data.shape[-1]
                parts[i], shapes[i] = parts[i][first * width : last * width], [last - first]
            else:
                row = rows[i][..., mask[i].detach().cpu() != 0]
                parts[i], shapes[i] = equal_bits(flat_bytes(row), dtype), list(row.shape)
    for hasher, shape, part in zip(hashers, shapes, parts, strict=True):
        hasher.put(f"field {name}")
        hasher.put(f"array {dtype} {shape}", part)


def _ends(mask: torch.Tensor) -> list[tuple[int, int]]:
    """Where what a mask marks begins and ends in each row; an end of -1: it has gaps."""
    real = mask.detach().cpu().numpy() != 0
    counts, first = real.sum(axis=1), real.argmax(axis=1)
    last = real.shape[1] - real[:, ::-1].argmax(axis=1)
    last = np.where(counts == 0, first, np.where(last - first == counts, last, -1))
    return [*zip(first.tolist(), last.tolist(), strict=True)]
