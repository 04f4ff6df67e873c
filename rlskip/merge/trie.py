"""A group's rows as a trie, laid out depth first.

The rows are sorted, so that a row shares its longest prefix with the row before it. The layout
holds of each row what it does not share. A position of the layout has one next token: where two
rows branch, the last token that they share is laid out once for each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from rlskip.merge.token_rows import TokenRows
from rlskip.merge.turns import MergeError


class Branches(NamedTuple):
    """Some of a group's rows in the order of the layout."""

    rows: np.ndarray  # int64 [n]: numbers of the rows
    starts: np.ndarray  # int64 [n]: the depth from which on a row has positions of its own
    lengths: np.ndarray  # int64 [n]: tokens in each row

    @property
    def size(self) -> int:
        """How many positions the layout has."""
        return int((self.lengths - self.starts).sum())


def branches(tokens: TokenRows, rows: np.ndarray) -> Branches:
    """Sort these rows, and find where each one leaves the row before it."""
    words = tokens.ids.astype(">u4")  # big-endian: bytes sort as the ids do

    def content(row: int) -> bytes:
        return words[tokens.offsets[row] : tokens.offsets[row + 1]].tobytes()

    ordered = np.array(sorted(rows.tolist(), key=content), np.int64)
    lengths = np.diff(tokens.offsets)[ordered]
    starts = np.zeros(len(ordered), np.int64)
    for i, (before, row) in enumerate(pairwise(ordered.tolist()), start=1):
        shared = _shared(tokens, before, row)
        # A row that continues the one before it shares all of that row. Others share one token
        # less, because that token has another one after it.
        starts[i] = shared if shared == lengths[i - 1] else max(shared - 1, 0)
    return Branches(ordered, starts, lengths)


def _shared(tokens: TokenRows, before: int, row: int) -> int:
    """How many tokens two rows have in common at their start."""
    a = tokens.ids[tokens.offsets[before] : tokens.offsets[before + 1]]
    b = tokens.ids[tokens.offsets[row] : tokens.offsets[row + 1]]
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax())
    return first if n and differ[first] else n


def cut(trie: Branches, max_tokens: int) -> Iterator[Branches]:
    """Cut a trie into parts of at most `max_tokens` positions, with the fewest positions in all.

    A part begins with a whole row, whose shared tokens are computed a second time. Parts hold
    neighbours of the layout.

    Raises
    ------
    MergeError
        A row is longer than `max_tokens`.
    """
    if trie.size <= max_tokens:
        yield trie
        return
    longest = int(trie.lengths.argmax())
    if trie.lengths[longest] > max_tokens:
        raise MergeError(
            f"it has {trie.lengths[longest]} tokens, and max_tokens is {max_tokens}",
            f"input_ids[{trie.rows[longest]}]",
            "raise max_tokens, or truncate the row",
        )
    n = len(trie.rows)
    own = np.concatenate([[0], np.cumsum(trie.lengths - trie.starts)])
    best = np.zeros(n + 1, np.int64)  # positions of the rows from i on, cut in the best way
    end_of = np.zeros(n, np.int64)
    for i in reversed(range(n)):
        # A part of the rows i to j has own[j] - own[i] positions, and what row i shares.
        again = trie.starts[i] - own[i]
        last = int(np.searchsorted(own, max_tokens - again, side="right")) - 1
        totals = own[i + 1 : last + 1] + best[i + 1 : last + 1]
        # Of equally good ends take the last: fewer parts.
        j = i + len(totals) - int(totals[::-1].argmin())
        end_of[i], best[i] = j, totals.min() + again
    i = 0
    while i < n:
        part = slice(i, int(end_of[i]))
        starts = trie.starts[part].copy()
        starts[0] = 0
        yield Branches(trie.rows[part], starts, trie.lengths[part])
        i = part.stop


def first_fit_decreasing(sizes: list[int], room: int) -> list[list[int]]:
    """Put items into bins: the largest first, each into the first bin that has room for it."""
    bins: list[list[int]] = []
    left = np.empty(len(sizes), np.int64)
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fits = left[: len(bins)] >= sizes[item]
        first = int(fits.argmax()) if fits.any() else len(bins)
        if first == len(bins):
            left[first] = room
            bins.append([])
        bins[first].append(item)
        left[first] -= sizes[item]
    return bins
