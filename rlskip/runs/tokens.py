"""The tokens of each row, without padding: views of the columns that hold them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from rlskip.batch.padding import Misfit
from rlskip.batch.ragged import Ragged, numbers
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
    log-prob. What the columns do not have is None, and so is what does not fit the tokens: the
    `misfits`. `rows` are None if no column holds tokens. `rewards` has where in each row's rewards
    those of its response are, if it has one for each token.
    """

    prompt: Arrays | None = None
    response: Arrays | None = None
    mask: Cells | None = None
    log_probs: Cells | None = None
    rows: Rows | None = None
    rewards: Sequence[tuple[int, int] | None] = ()
    misfits: Sequence[Misfit] = ()

    @classmethod
    def of(cls, columns: Columns) -> Tokens:
        """Those that the columns hold. Text, and numbers that are no tokens, are none."""
        try:
            # What has no value for each row may be a mask of other rows.
            found = RowColumns.of({**columns.whole, **columns.columns}, columns.fields)
            rows = Rows.of(found)
        except RecordError:
            return cls()
        probs, misfits = rows.spans(found, "log_probs")
        rewards, more = rows.spans(found, "reward")
        return cls(
            rows.prompt.cells if rows.has_prompts else None,
            rows.response.cells,
            None if rows.mask is None else _where_given(rows.mask),
            _parts(columns.of("log_probs"), probs),
            rows,
            rewards,
            [*rows.misfits, *misfits, *more],
        )

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row's response; empty if no column holds tokens."""
        return list(map(len, self.response or ()))


def _where_given(mask: Ragged) -> Cells:
    return [cell if given else None for cell, given in zip(mask.cells, mask.given, strict=True)]


def _parts(
    column: Sequence[object] | None, spans: Sequence[tuple[int, int] | None]
) -> Cells | None:
    if column is None or len(column) != len(spans):
        return None
    pairs = zip(column, spans, strict=True)
    cells = [(None if span is None else numbers(cell), span) for cell, span in pairs]
    return [None if cell is None or span is None else cell[slice(*span)] for cell, span in cells]


def if_finite(value: float) -> float | None:
    """`value`; None for NaN and the infinities."""
    return value if math.isfinite(value) else None


def total_of(value: Any, span: tuple[int, int] | None) -> float | None:
    """A reward as one finite number: of one for each token the sum, without what padding has."""
    if isinstance(value, int | float):
        with contextlib.suppress(OverflowError):
            return if_finite(float(value))
        return None
    if (given := numbers(value)) is None:
        return None
    return if_finite(float(given[slice(*span) if span else slice(None)].sum(dtype=np.float64)))
