"""The tokens of each row, without padding: views of the columns that hold them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from rlskip.runs.columns import Columns

Arrays = Sequence[np.ndarray]
"""An array of one dimension for each row."""
Cells = Sequence[np.ndarray | None]
"""The same; None where a row has no such value."""


@attrs.frozen(eq=False)
class Tokens:
    """For each row its prompt and its response, without padding.

    A response begins with the first sampled token. ``mask`` is not 0 for each of its tokens that
    was sampled, ``log_probs`` has its log-prob. What the columns do not have is None.
    """

    prompt: Arrays | None = None
    response: Arrays | None = None
    mask: Cells | None = None
    log_probs: Cells | None = None

    @classmethod
    def of(cls, columns: Columns) -> Tokens:
        """Those that the columns hold. Text, and numbers that are no tokens, are none."""
        prompt, response, whole = (_tokens(columns, w) for w in ("prompt", "response", "whole"))
        mask, log_probs = _numbers(columns, "mask"), _numbers(columns, "log_probs")
        attention = columns.array("attention")
        if response is None and whole is not None:
            return _of_whole(whole, attention, mask, log_probs)
        if prompt is not None and (real := _real(columns, "prompt")) is not None:
            prompt = _kept(prompt, real)
        if response is not None and (real := _real(columns, "response")) is not None:
            ends = _ends(real)
            response = [cell[:end] for cell, end in zip(response, ends, strict=True)]
            mask, log_probs = _cut(mask, ends), _cut(log_probs, ends)
        return cls(prompt, response, mask, log_probs)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row's response; empty if no column holds tokens."""
        return list(map(len, self.response or ()))


def _of_whole(
    whole: Arrays, attention: np.ndarray | None, mask: Cells | None, log_probs: Cells | None
) -> Tokens:
    """Of rows that hold prompt and response: the prompt is what precedes the first sampled one."""
    prompt, starts, ends = [], [], []
    for i, row in enumerate(whole):
        flags = None if mask is None else mask[i]
        sampled = () if flags is None else np.flatnonzero(flags).tolist()
        first, last = (sampled[0], sampled[-1] + 1) if sampled else (len(row), len(row))
        head = row[:first]
        if attention is not None and attention[i].size == len(row):
            head = head[attention[i].reshape(-1)[:first] != 0]
        prompt.append(head)
        starts.append(first)
        ends.append(last)
    response = [row[a:b] for row, a, b in zip(whole, starts, ends, strict=True)]
    mask, log_probs = _cut(mask, ends, starts), _cut(log_probs, ends, starts)
    return Tokens(prompt, response, mask, log_probs)


def _cut(cells: Cells | None, ends: Sequence[int], starts: Sequence[int] = ()) -> Cells | None:
    if cells is None:
        return None
    spans = zip(cells, starts or [0] * len(ends), ends, strict=True)
    return [None if cell is None else cell[start:end] for cell, start, end in spans]


# -- what of a padded column is padding ----------------------------------------------------


def _ends(real: np.ndarray) -> list[int]:
    """For each row the place after the last token that is real; 0 if none is."""
    width, flags = real.shape[1], real.tobytes()  # bytes are searched faster than arrays
    starts = (width * i for i in range(len(real)))
    return [max(0, flags.rfind(1, at, at + width) + 1 - at) for at in starts]


def _kept(cells: Arrays, real: np.ndarray) -> Arrays:
    """What of each cell is not padding: a view, where the padding is at one or both ends."""
    width, flags = real.shape[1], real.tobytes()
    found = []
    for i, (cell, end) in enumerate(zip(cells, _ends(real), strict=True)):
        at = width * i
        start = max(0, flags.find(1, at, at + end) - at)
        has_gaps = flags.find(0, at + start, at + end) >= 0
        found.append(cell[real[i]] if has_gaps else cell[start:end])
    return found


def _real(columns: Columns, what: str) -> np.ndarray | None:
    """Which tokens of a padded column are not padding, as far as masks tell.

    Of a response only what follows the last of them is padding: gaps are not.
    """
    column, attention = columns.array(what), columns.array("attention")
    if column is None or column.ndim != 2:
        return None
    width = column.shape[1]
    if attention is not None and attention.ndim == 2 and attention.shape[1] >= width:
        of_prompt = what in ("prompt", "whole")
        if of_prompt or attention.shape[1] > width:
            at = 0 if of_prompt else attention.shape[1] - width
            real: np.ndarray = attention[:, at : at + width] != 0
            return real
    mask = columns.array("mask")
    if what in ("prompt", "whole") or mask is None or mask.shape != column.shape:
        return None
    sampled: np.ndarray = mask != 0
    return sampled


def without_padding(columns: Columns, name: str) -> np.ndarray | None:
    """The values of a padded column that are not padding, flat; None for any other column.

    Of a reward for each token, the reward of each row.
    """
    for what in ("prompt", "response", "whole", "log_probs", "mask", "reward"):
        column = columns.array(what)
        if columns.name_of(what) != name or column is None or column.ndim != 2:
            continue
        if what == "reward":
            total: np.ndarray = column.sum(1)
            return total
        real = _real(columns, what)
        if real is not None and what in ("response", "mask"):
            real = np.arange(column.shape[1]) < np.array(_ends(real))[:, None]
        return None if real is None else column[real]
    return None


# -- cells ---------------------------------------------------------------------------------


def _tokens(columns: Columns, what: str) -> Arrays | None:
    array = columns.array(what)
    if array is not None:
        whole = _whole_numbers(array)
        return None if whole is None else _rows(whole)
    found = []
    for cell in _numbers(columns, what) or ():
        whole = None if cell is None else _whole_numbers(cell)
        if whole is None:
            return None
        found.append(whole)
    return found if columns.name_of(what) else None


def _whole_numbers(cell: np.ndarray) -> np.ndarray | None:
    if cell.dtype.kind in "iu":
        return cell
    with np.errstate(invalid="ignore"):  # NaN, and what int64 lacks, is no token
        whole = cell.astype(np.int64)
    return whole if (whole == cell).all() else None


def _numbers(columns: Columns, what: str) -> Cells | None:
    array = columns.array(what)
    if array is not None:
        return _rows(array)
    column = columns.of(what)
    return None if column is None else [numbers(cell) for cell in column]


def _rows(array: np.ndarray) -> Arrays:
    return list(array.reshape(len(array), math.prod(array.shape[1:])))


def numbers(cell: Any) -> np.ndarray | None:
    """A cell as an array of one dimension; None if it is anything but numbers."""
    if isinstance(cell, np.ndarray | np.generic):
        array = np.asarray(cell)
    elif isinstance(cell, list | tuple) and all(isinstance(v, int | float) for v in cell):
        array = np.asarray(cell) if cell else np.empty(0, np.int64)
    else:
        return None
    return array.reshape(-1) if array.dtype.kind in "biuf" else None
