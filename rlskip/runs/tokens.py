"""The tokens of each row, without padding: views of the columns that hold them."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from rlskip.batch.ragged import numbers
from rlskip.batch.rows import RecordError, RowColumns, Rows
from rlskip.runs.columns import Columns

Arrays = Sequence[np.ndarray]
"""An array of one dimension for each row."""
Cells = Sequence[np.ndarray | None]
"""The same; None where a row has no such value."""


@attrs.frozen(eq=False)
class Tokens:
    """For each row its prompt and its response, as :class:`~rlskip.batch.rows.Rows` has them.

    ``mask`` is true for each token of the response that was sampled, ``log_probs`` has its
    log-prob. What the columns do not have is None.
    """

    prompt: Arrays | None = None
    response: Arrays | None = None
    mask: Cells | None = None
    log_probs: Cells | None = None

    @classmethod
    def of(cls, columns: Columns) -> Tokens:
        """Those that the columns hold. Text, and numbers that are no tokens, are none."""
        try:
            rows = Rows.of(RowColumns.of(columns.columns, columns.fields))
        except RecordError:
            return cls()
        return cls(
            rows.prompt.cells if rows.has_prompts else None,
            rows.response.cells,
            None if rows.mask is None else _where_given(rows.mask.cells, columns.of("mask")),
            _log_probs(columns, rows),
        )

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row's response; empty if no column holds tokens."""
        return list(map(len, self.response or ()))


def _where_given(cells: Arrays, given: Sequence[object] | None) -> Cells:
    if given is None:
        return cells
    return [None if one is None else cell for cell, one in zip(cells, given, strict=True)]


def _log_probs(columns: Columns, rows: Rows) -> Cells | None:
    column, array = columns.of("log_probs"), columns.array("log_probs")
    if column is None:
        return None
    padded = rows.response_spans(array.shape[1]) if array is not None and array.ndim == 2 else None
    if padded is not None:
        return [cell[a:b] for cell, (a, b) in zip(column, padded.tolist(), strict=True)]
    # A list may have one for each token of the row.
    cells = [numbers(cell) for cell in column]
    lengths = zip(cells, rows.prompt.lengths.tolist(), rows.lengths.tolist(), strict=True)
    return [
        cell[prompt:] if cell is not None and len(cell) == whole else cell
        for cell, prompt, whole in lengths
    ]
