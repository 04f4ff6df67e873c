"""Which rows of two stages belong together, wherever the batches of each run put them."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from rlskip.compare.records import Record

_INSTANCE = [("key", "u8"), ("session", "i8"), ("occurrence", "i8")]


@attrs.frozen(eq=False)
class Pairs:
    """Rows of A and of B that are the same row.

    Parameters
    ----------
    rows
        int64 [pairs, 4]: the record and the row in it, of A, then of B; in the order of A.
    only_a, only_b
        How many rows the other side lacks.
    """

    rows: np.ndarray
    only_a: int
    only_b: int


def pair_rows(a: Sequence[Record], b: Sequence[Record]) -> Pairs:
    """Pair the rows of a stage.

    Rows with equal tokens are paired, of one session where both sides number sessions. Where a row
    was recorded several times, or several sessions have the same tokens, the first is paired with
    the first.
    """
    by_session = all(record.sessions is not None for record in (*a, *b))
    mine, theirs = (_instances(records, by_session) for records in (a, b))
    _, i, j = np.intersect1d(mine[0], theirs[0], assume_unique=True, return_indices=True)
    rows = np.concatenate([mine[1][i], theirs[1][j]], axis=1)
    order = np.lexsort((rows[:, 1], rows[:, 0]))
    return Pairs(rows[order], len(mine[0]) - len(i), len(theirs[0]) - len(j))


def _instances(records: Sequence[Record], by_session: bool) -> tuple[np.ndarray, np.ndarray]:
    """What names each row that was recorded, and where it is: its record and its place there."""
    sizes = [len(record.keys) for record in records if record.keys is not None]
    found = np.zeros(sum(sizes), _INSTANCE)
    found["key"] = np.concatenate([record.keys for record in records])  # type: ignore[misc]
    if by_session:
        found["session"] = np.concatenate([record.sessions for record in records])  # type: ignore[misc]
    places = np.stack(
        [np.repeat(np.arange(len(sizes)), sizes), np.concatenate([np.arange(n) for n in sizes])],
        axis=1,
    )
    order = np.lexsort((np.arange(len(found)), found["session"], found["key"]))
    found, places = found[order], places[order]
    # The number of each among those of one name, which are next to each other now.
    alike = np.ones(len(found), bool)
    if len(found):
        alike[0] = False
        alike[1:] = (found["key"][1:] == found["key"][:-1]) & (
            found["session"][1:] == found["session"][:-1]
        )
    starts = np.maximum.accumulate(np.where(alike, 0, np.arange(len(found))))
    found["occurrence"] = np.arange(len(found)) - starts
    return found, places
