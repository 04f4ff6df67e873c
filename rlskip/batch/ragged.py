"""A column's rows of unequal lengths, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from rlskip._copies import Memory, gathered, truths
from rlskip.batch.columns import cells_of, is_tensor
from rlskip.batch.meta import plain


@attrs.frozen(eq=False)
class Ragged:
    """A column's rows in one array: where in `flat` each starts and ends, int64 [B].

    ``is_padded`` tells whether they may hold padding: they had to be of one length.
    """

    flat: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    is_padded: bool = False

    @classmethod
    def of(cls, column: Any, dtype: type, memory: Memory) -> Ragged:
        """Of any column: a view of an array of tokens, a copy of masks and of cells."""
        if is_tensor(column) and not column.is_nested:
            column = column.detach().cpu().numpy()
        if isinstance(column, np.ndarray):
            ends = (np.arange(len(column)) + 1) * column.shape[1]
            flat = np.ascontiguousarray(column).reshape(-1)
            flat = truths(flat, memory) if dtype is bool else flat
            return cls(flat, ends - column.shape[1], ends, is_padded=True)
        return cls.of_cells([np.asarray(plain(cell), dtype) for cell in cells_of(column) or ()])

    @classmethod
    def of_cells(cls, cells: Sequence[np.ndarray]) -> Ragged:
        starts, ends = spans_of([len(cell) for cell in cells]).T
        return cls(np.concatenate([np.empty(0, bool), *cells]), starts, ends)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def lengths(self) -> np.ndarray:
        return self.ends - self.starts  # type: ignore[no-any-return]

    @property
    def cells(self) -> list[np.ndarray]:
        spans = zip(self.starts.tolist(), self.ends.tolist(), strict=True)
        return [self.flat[start:end] for start, end in spans]

    def cut(self, starts: np.ndarray | int, ends: np.ndarray) -> Ragged:
        """A part of each row."""
        return Ragged(self.flat, self.starts + starts, self.starts + ends)

    def has(self, lengths: np.ndarray) -> bool:
        return bool((self.lengths == lengths).all())

    def copied(self, memory: Memory) -> Ragged:
        spans = np.stack([self.starts, self.ends], axis=1)
        flat, spans = gathered(self.flat, spans, memory)
        return Ragged(flat, *spans.T)


def extents(mask: Ragged | None, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where in each row what is not padding starts and ends; all without a mask of that width."""
    if mask is None or not mask.has(lengths):
        return np.zeros_like(lengths), lengths
    rows = (cell.tobytes() for cell in mask.cells)
    found = [(row.find(1), row.rfind(1) + 1) for row in rows]
    first, last = np.array(found, np.int64).reshape(-1, 2).T
    return np.where(first < 0, lengths, first), np.where(first < 0, lengths, last)


def spans_of(lengths: Sequence[int]) -> np.ndarray:
    """Start and end of parts of these lengths, one after the other, int64 [B, 2]."""
    ends = np.cumsum(np.asarray(lengths, np.int64), dtype=np.int64)
    return np.stack([ends - np.asarray(lengths, np.int64), ends], axis=1)
