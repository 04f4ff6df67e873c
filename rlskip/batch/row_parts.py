"""Where in a value each row's part is, and which of the row's tokens its entries belong to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from rlskip.batch.ragged import spans_of
from rlskip.batch.rows import RecordError, Rows

#: How a value's entries correspond to a row's tokens.
RESPONSE, WHOLE, SHIFTED, SAMPLED = "response", "whole", "shifted", "sampled"


@attrs.frozen(eq=False)
class Layout:
    """Where in a value each row's part is.

    ``align`` is what the entries of a part belong to: each token of the response, each token of
    the row (``whole``), each but the first (``shifted``: the logits before it), or each ``sampled``
    one; None if a part is not one value a token. ``spans`` are start and end of each row's part,
    int64 [B, 2]: along the second dimension, or of a flat value along the first; None if a part is
    one entry of the first dimension.
    """

    align: str | None = None
    spans: np.ndarray | None = None
    flat: bool = False

    def part(self, value: Any, row: int) -> Any:
        """The part of a value that belongs to a row."""
        if self.spans is None:
            return value[row : row + 1]
        start, end = self.spans[row].tolist()
        return value[start:end] if self.flat else value[row, start:end]

    @classmethod
    def of(cls, rows: Rows, shape: Sequence[int], lengths: Sequence[int] | None = None) -> Layout:
        """That of a value for `rows` which has this shape, or is flat with parts of these lengths.

        Raises RecordError where the value has no part for each row.
        """
        n = len(rows)
        if lengths is None and shape and shape[0] == n:
            return _padded(rows, shape[1]) if len(shape) > 1 else cls()
        counts = [int(np.count_nonzero(mask)) for mask in rows.sampled]
        if lengths is not None and len(lengths) == n:
            every: dict[str, Any] = {
                RESPONSE: rows.response.lengths,
                WHOLE: rows.lengths,
                SAMPLED: counts,
            }
            equal = (align for align, known in every.items() if list(lengths) == list(known))
            return cls(next(equal, None), spans_of(lengths), flat=True)
        if len(shape) == 1 and shape[0] == sum(counts):
            return cls(SAMPLED, spans_of(counts), flat=True)
        raise RecordError(
            f"a value of shape {list(shape)} has no part for each of {n} rows",
            remedy=f"give it {n} entries, or one for each of the {sum(counts)} sampled tokens",
        )


def _padded(rows: Rows, width: int) -> Layout:
    *alone, whole = rows.places
    places = [(RESPONSE, one, 0) for one in alone]
    if (whole.ends - whole.starts == rows.lengths).all():  # no padding within rows
        places += [(WHOLE, whole, 0), (SHIFTED, whole, 1)]
    for align, one, less in places:
        if (one.widths - less == width).all() and len(rows):
            spans = np.stack([one.starts, np.maximum(one.starts, one.ends - less)], axis=1)
            return Layout(align, spans)
    return Layout()


def token_places(
    align: str | None, entries: int, prompt_length: int, sampled: np.ndarray
) -> np.ndarray:
    """Which token of a row each entry of its part belongs to, int64; none without an alignment.

    `sampled` tells which of the row's tokens were, bool [T]. An entry beyond them has no place.
    """
    if align is None:
        return np.empty(0, np.int64)
    if align == SAMPLED:
        return np.flatnonzero(sampled)[:entries]
    first = {WHOLE: 0, SHIFTED: 1}.get(align, prompt_length)
    return np.arange(first, min(first + entries, len(sampled)))


def by_token(
    part: np.ndarray, align: str | None, prompt_length: int, sampled: np.ndarray
) -> np.ndarray:
    """A row's part as one float64 for each of the row's tokens; NaN where it has none."""
    found = np.full(len(sampled), np.nan)
    places = token_places(align, len(part), prompt_length, sampled)
    found[places] = part.reshape(len(part), -1)[: len(places), 0] if len(places) else 0
    return found
