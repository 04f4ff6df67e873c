"""A column's rows of unequal lengths, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from rlskip._copies import Memory, gathered
from rlskip.batch.columns import cells_of, is_tensor
from rlskip.batch.meta import plain

NUMBER = (int, float, np.integer, np.floating, np.bool_)


@attrs.frozen(eq=False)
class Ragged:
    """A column's rows in one array: where in `flat` each starts and ends, int64 [B].

    ``is_padded`` tells whether they may hold padding: they had to be of one length. ``given`` tells
    which rows have a value, bool [B]; the others are empty.
    """

    flat: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    is_padded: bool = False
    given: np.ndarray = attrs.field(
        default=attrs.Factory(lambda self: np.ones(len(self.starts), bool), takes_self=True)
    )

    @classmethod
    def of(cls, column: Any, dtype: type) -> Ragged | None:
        """Of any column: a view of an array of tokens, a copy of masks and of cells.

        None if a cell is anything but whole numbers, or if no row has a mask.
        """
        if is_padded(column):
            if is_tensor(column):  # numpy lacks bfloat16
                column = column.float() if column.is_floating_point() else column
                column = column.detach().cpu().numpy()
            if column.ndim != 2 or column.dtype.kind not in "biuf":
                return None
            flat = np.ascontiguousarray(column).reshape(-1)
            if (found := flat != 0 if dtype is bool else _whole(flat)) is None:
                return None
            ends = (np.arange(len(column)) + 1) * column.shape[1]
            return cls(found, ends - column.shape[1], ends, is_padded=True)
        whole: list[np.ndarray] = []
        cells = cells_of(column) or ()
        given = np.array([cell is not None for cell in cells], bool)
        for cell in cells:
            read = numbers([] if cell is None else cell)
            if read is None or (found := read != 0 if dtype is bool else _whole(read)) is None:
                return None
            whole.append(found)
        if dtype is bool and whole and not given.any():
            return None
        return attrs.evolve(cls.of_cells(whole), given=given)

    @classmethod
    def of_cells(cls, cells: Sequence[np.ndarray]) -> Ragged:
        starts, ends = spans_of([len(cell) for cell in cells]).T
        flat = np.concatenate(cells) if cells else np.empty(0, np.int64)
        return cls(flat, starts, ends)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def lengths(self) -> np.ndarray:
        return self.ends - self.starts  # type: ignore[no-any-return]

    @property
    def spans(self) -> Iterator[tuple[int, int]]:
        return zip(self.starts.tolist(), self.ends.tolist(), strict=True)

    @property
    def cells(self) -> list[np.ndarray]:
        return [self.flat[start:end] for start, end in self.spans]

    def cut(self, starts: np.ndarray | int, ends: np.ndarray) -> Ragged:
        """A part of each row that has a value."""
        spans = self.starts + starts * self.given, self.starts + ends * self.given
        return Ragged(self.flat, *spans, given=self.given)

    def without_gaps(self, mask: Ragged | None) -> Ragged:
        """What the mask of these rows keeps: the rows themselves where it leaves nothing out."""
        if mask is None:
            return self
        flags = mask.flat.tobytes()
        if all(flags.find(0, *span) < 0 for span in mask.spans):
            return self
        rows = zip(self.cells, mask.cells, mask.given.tolist(), strict=True)
        found = Ragged.of_cells([cell[real] if given else cell for cell, real, given in rows])
        # The dtype says of narrow integers what they were in the dump.
        return attrs.evolve(found, flat=found.flat.view(self.flat.dtype))

    def copied(self, memory: Memory) -> Ragged:
        flat, spans = gathered(self.flat, np.stack([self.starts, self.ends], axis=1), memory)
        return Ragged(flat, *spans.T)


def spans_of(lengths: Sequence[int]) -> np.ndarray:
    """Start and end of parts of these lengths, one after the other, int64 [B, 2]."""
    ends = np.cumsum(np.asarray(lengths, np.int64), dtype=np.int64)
    return np.stack([ends - np.asarray(lengths, np.int64), ends], axis=1)


def lengths_of(column: Any) -> np.ndarray:
    """How many values each row has, int64 [B]; -1 where it has no sequence of one dimension.

    The values themselves are not read.
    """
    if is_padded(column):
        width = column.shape[1] if column.ndim == 2 else -1
        return np.full(column.shape[0] if column.ndim else 0, width)
    is_jagged = is_tensor(column) and hasattr(column, "offsets")
    if is_jagged and column.dim() == 2 and column.lengths() is None:  # or there are holes
        return np.asarray(column.offsets().diff().cpu())
    return np.array([_length_of(cell) for cell in cells_of(column) or ()], np.int64)


def is_padded(column: Any) -> bool:
    """Whether its rows had to be of one length."""
    if is_tensor(column):
        return not column.is_nested
    return isinstance(column, np.ndarray) and column.dtype != object


def _length_of(cell: Any) -> int:
    if isinstance(cell, list | tuple) or getattr(cell, "ndim", None) == 1:
        return len(cell)
    return -1


def numbers(cell: Any) -> np.ndarray | None:
    """A cell as an array of one dimension; None if it is anything but numbers."""
    if is_tensor(cell) or (isinstance(cell, np.ndarray) and cell.dtype == object):
        cell = cell.tolist()
    if isinstance(cell, np.ndarray | np.generic):
        array = np.asarray(cell)
    elif isinstance(cell, list | tuple) and all(isinstance(v, NUMBER) for v in cell):
        array = np.asarray(cell) if cell else np.empty(0, np.int64)
    else:
        return None
    return array.reshape(-1) if array.dtype.kind in "biuf" else None


def holds_numbers(column: Any) -> bool:
    """Whether its type tells of a sequence of whole numbers for each row, as tokens are."""
    if is_tensor(column):
        return column.is_nested or (column.dim() == 2 and not column.dtype.is_floating_point)
    if isinstance(column, np.ndarray) and column.dtype != object:
        return column.ndim == 2 and column.dtype.kind in "biu"
    cells = (cell for cell in cells_of(column) or () if cell is not None)
    cell = plain(next(cells, None))
    return isinstance(cell, list | tuple) and numbers(cell) is not None


def _whole(array: np.ndarray) -> np.ndarray | None:
    """Numbers as whole ones; None if they are not."""
    if array.dtype.kind in "biu":
        return array
    with np.errstate(invalid="ignore"):  # NaN, or a value that int64 lacks, is not a token
        whole = array.astype(np.int64)
    return whole if (whole == array).all() else None
