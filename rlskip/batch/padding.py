"""Which tokens of the columns of a batch belong to a row, and which are padding.

What a mask of attention or of the prompt leaves out of a prompt is padding, wherever it is; without
one, a prompt has none. Of a response, and of a row that is one column, only what follows its last
token is padding: gaps belong to it. The last one is the last that is attended to; without a mask of
attention, the last one that was sampled. (A trainer that masks prompts masks responses alike, not
what of them was sampled.) Lists have no padding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlskip.batch.ragged import Ragged, numbers


def unpadded(read: dict[str, Ragged]) -> dict[str, Any]:
    """What :class:`~rlskip.batch.rows.Rows` has of rows with these columns."""
    return _of_two(read) if "response" in read else _of_one(read)


def _of_one(read: dict[str, Ragged]) -> dict[str, Any]:
    """What :class:`Rows` has of rows whose prompt and response are in one column."""
    whole = read["whole"]
    mask, attention = (_fitting(read.get(what), whole.lengths) for what in ("mask", "attention"))
    starts, ends = _extents(attention, whole.lengths)
    fills = [b""] * len(whole)
    if attention is None and whole.is_padded:
        ends = ends.copy()
        first, last = _extents(mask, whole.lengths)
        least = np.where((mask is None) | (first == whole.lengths), 0, last)
        for i, cell in enumerate(whole.cells):
            # A run at the end is taken for padding as far as none of it was sampled; its token is
            # part of what names the row.
            others = np.flatnonzero(cell != cell[-1:])
            end = max(int(others[-1]) + 1 if len(others) else 0, int(least[i]))
            if len(cell) - end > 1:
                ends[i], fills[i] = end, np.int64(cell[-1]).tobytes()
    firsts = ends
    if mask is not None:
        firsts = starts + _extents(mask.cut(starts, ends), ends - starts)[0]
    seen = attention and attention.cut(starts, firsts)
    return {
        "prompt": whole.cut(starts, firsts).without_gaps(seen),
        "response": whole.cut(firsts, ends),
        "mask": mask and mask.cut(firsts, ends),
        "fills": fills,
        "has_prompts": True,
        "of_response": (np.full(len(whole), -1), firsts, ends),
        "of_whole": (whole.lengths, starts, ends),
    }


def _of_two(read: dict[str, Ragged]) -> dict[str, Any]:
    """What :class:`Rows` has of rows whose prompts and responses are in a column each."""
    response = read["response"]
    prompt = read.get("prompt") or Ragged.of_cells([np.empty(0, np.int64)] * len(response))
    mask = _fitting(read.get("mask"), response.lengths)
    attention = _fitting(read.get("attention"), prompt.lengths + response.lengths)
    if attention is not None:
        of_prompt: Ragged | None = attention.cut(0, prompt.lengths)
        of_response: Ragged | None = attention.cut(prompt.lengths, attention.lengths)
    else:
        of_prompt = _fitting(read.get("prompt_mask"), prompt.lengths)
        # A mask alone may leave out what a tool said: where there is no padding it cuts nothing.
        of_response = mask if response.is_padded else None
    starts, stops = _extents(of_prompt, prompt.lengths)
    # A gap in the response belongs to it; what follows its last real token is padding.
    first, ends = _extents(of_response, response.lengths)
    if of_prompt is not None:  # a response without any token that is attended to is empty
        ends = np.where(first == response.lengths, 0, ends)
    seen = of_prompt and of_prompt.cut(starts, stops)
    return {
        "prompt": prompt.cut(starts, stops).without_gaps(seen),
        "response": response.cut(0, ends),
        "mask": mask and mask.cut(0, ends),
        "has_prompts": "prompt" in read,
        "of_response": (response.lengths, np.zeros_like(ends), ends),
        "of_whole": (prompt.lengths + response.lengths, starts, prompt.lengths + ends),
    }


def _fitting(mask: Ragged | None, lengths: np.ndarray) -> Ragged | None:
    """The mask if its rows have these lengths."""
    return mask if mask is not None and (mask.lengths == lengths).all() else None


def _extents(mask: Ragged | None, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where in each row of these lengths what is not padding starts and ends; all without a mask.

    Both are the length of a row of which the mask keeps nothing.
    """
    if mask is None:
        return np.zeros_like(lengths), lengths
    flags = mask.flat.tobytes()  # bytes are searched faster than arrays
    found = [(flags.find(1, *span), flags.rfind(1, *span) + 1) for span in mask.spans]
    first, last = np.array(found, np.int64).reshape(-1, 2).T
    none = first < 0
    first, last = first - mask.starts, last - mask.starts
    return np.where(none, lengths, first), np.where(none, lengths, last)


def completed(mask: list[Any], read: dict[str, Ragged]) -> list[Any]:
    """A mask of lists. Where a row has none of its length, all of its response was sampled.

    Of a row that is one column nothing was.
    """
    of_response = "response" in read
    lengths = read["response" if of_response else "whole"].lengths.tolist()
    pairs = list(zip(map(numbers, mask), lengths, strict=False))
    fits = [cell is not None and len(cell) == length for cell, length in pairs]
    if not any(fits):
        return mask
    return [
        cell if fit else np.full(length, of_response)
        for (cell, length), fit in zip(pairs, fits, strict=True)
    ]
