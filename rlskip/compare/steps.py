"""One step of two jobs compared: rollouts first, then stage by stage."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlskip.batch.row_parts import token_places
from rlskip.compare.records import (
    Record,
    StepRecords,
    Values,
    copies,
    is_single,
    pair_rows,
    single_values,
)
from rlskip.compare.rounding import Rounding, differences, other_zeros, scale
from rlskip.compare.verdict import (
    DIFFERS,
    EQUAL,
    MASK,
    ROLLOUTS,
    ROUNDING,
    UNPAIRED,
    Place,
    StageResult,
    StepResult,
    around_token,
    name_of,
)
from rlskip.stages.digest import MOMENTS
from rlskip.stages.parts import DIGEST, NUMBER, ROWS

_MEANS = np.array([name in ("mean", "order") for name in MOMENTS])


def compare_step(step: int, a: StepRecords, b: StepRecords, rounding: Rounding) -> StepResult:
    """Compare what two jobs recorded at a step.

    Raises
    ------
    DumpError
        A value cannot be read.
    """
    found = _compare_rows(step, a, b)
    for name, mine in a.stages.items():
        if name in b.stages:
            found.append(_Stage(step, name, a, rounding).compare(mine, b.stages[name]))
    only_a, only_b = ([n for n in x.stages if n not in y.stages] for x, y in ((a, b), (b, a)))
    return StepResult(step, found, only_a, only_b)


# -- the rows themselves -------------------------------------------------------------------------


def _compare_rows(step: int, a: StepRecords, b: StepRecords) -> list[StageResult]:
    if a.rows is None or b.rows is None:
        return []
    keys, mine, theirs = copies(a, b)
    only_a, only_b = np.maximum(mine - theirs, 0), np.maximum(theirs - mine, 0)
    off = max(int(only_a.sum()), int(only_b.sum()))
    rollouts = StageResult(
        step, ROLLOUTS, DIFFERS if off else EQUAL, -2,
        compared=int(np.minimum(mine, theirs).sum()) + off, off=off,
        note=f"{only_a.sum()} rows only in A, {only_b.sum()} only in B" if off else "",
        at=_first_other_token(a, b, keys[only_a > 0], keys[only_b > 0]) if off else None,
    )  # fmt: skip
    both, i, j = np.intersect1d(a.rows.keys, b.rows.keys, return_indices=True)
    other = np.flatnonzero(a.rows.masks[i] != b.rows.masks[j])
    mask = StageResult(
        step, MASK, DIFFERS if len(other) else EQUAL, -1,
        compared=len(both), off=len(other), largest=float(len(other) > 0),
        note="which tokens were sampled" if len(other) else "",
        at=_first_other_mask(a, b, i[other], j[other]) if len(other) else None,
    )  # fmt: skip
    return [rollouts, mask] if len(both) else [rollouts]


def _first_other_token(
    a: StepRecords, b: StepRecords, mine: np.ndarray, theirs: np.ndarray
) -> Place | None:
    """Where a row that A has more often, of keys `mine`, first differs from one of B's `theirs`
    with the same prompt."""
    assert a.rows is not None
    assert b.rows is not None
    mine, theirs = a.rows.find(mine), b.rows.find(theirs)
    for i in mine.tolist():
        alike = theirs[b.rows.prompts[theirs] == a.rows.prompts[i]]
        same = alike[
            (b.rows.sessions[alike] == a.rows.sessions[i])
            & (b.rows.turns[alike] == a.rows.turns[i])
        ]
        if not len(alike):
            continue
        j = int(same[0] if len(same) else alike[0])
        ours, others = a.tokens_of(i), b.tokens_of(j)
        if ours is None or others is None:
            return Place(None, None, row=name_of(a.rows, i))
        x, y = ours[0], others[0]
        upto = min(len(x), len(y))
        other = np.flatnonzero(x[:upto] != y[:upto])
        at = int(other[0]) if len(other) else upto
        one, two = (int(row[at]) if at < len(row) else None for row in (x, y))
        return Place(one, two, row=name_of(a.rows, i), token=at, around=around_token(x, at))
    return Place(None, None, row=name_of(a.rows, int(mine[0]))) if len(mine) else None


def _first_other_mask(a: StepRecords, b: StepRecords, i: np.ndarray, j: np.ndarray) -> Place | None:
    assert a.rows is not None
    name = name_of(a.rows, int(i[0]))
    ours, others = a.tokens_of(int(i[0])), b.tokens_of(int(j[0]))
    if ours is None or others is None:
        return Place(None, None, row=name)
    if not (
        ours[1] != others[1]
    ).any():  # one does not fit its tokens, the other has no sampled one
        return Place(None, None, row=name)
    at = int(np.flatnonzero(ours[1] != others[1])[0])
    values = bool(ours[1][at]), bool(others[1][at])
    return Place(*values, row=name, token=at, around=around_token(ours[0], at))


# -- a stage -------------------------------------------------------------------------------------


class _Stage:
    """Compares one stage of a step; keeps what was found so far."""

    def __init__(self, step: int, name: str, a: StepRecords, rounding: Rounding) -> None:
        self._step, self._name, self._a, self._rounding = step, name, a, rounding
        self._off = self._rounded = self._compared = 0
        self._largest = 0.0
        self._worst: tuple[float, Record, int, int | None, Any, Any, str | None] | None = None
        self._first: int | None = None
        self._dtypes: tuple[str, str] = ("", "")
        self._remark = ""

    def compare(self, mine: Sequence[Record], theirs: Sequence[Record]) -> StageResult:
        self._dtypes = mine[0].dtype, theirs[0].dtype
        forms = {record.form for record in (*mine, *theirs)}
        if len(forms) > 1 or len({record.has_rows for record in (*mine, *theirs)}) > 1:
            kinds = " and ".join(sorted(forms))
            return self._result(mine, UNPAIRED, note=f"recorded in two forms: {kinds}")
        if mine[0].has_rows:
            return self._compare_rows(mine, theirs)
        if len(mine) != len(theirs):
            note = f"{len(mine)} records in A, {len(theirs)} in B"
            return self._result(mine, UNPAIRED, unit="records", note=note)
        values = Values(), Values()
        for one, other in zip(mine, theirs, strict=True):
            if one.form == NUMBER:
                self._compare_numbers(one, other)
            else:
                a, b = values[0].of(one), values[1].of(other)
                if one.form == DIGEST:
                    self._compare_digests(one, a, b, np.zeros(1, int), np.zeros(1, int))
                elif a.shape != b.shape:
                    note = f"shapes {list(a.shape)} and {list(b.shape)}"
                    return self._result(mine, DIFFERS, unit="values", note=note)
                else:
                    self._add(one, -1, a.reshape(-1), b.reshape(-1), self._a.tokens)
        return self._result(mine, unit="values")

    def _compare_rows(self, mine: Sequence[Record], theirs: Sequence[Record]) -> StageResult:
        pairs = pair_rows(mine, theirs)
        values = Values(), Values()
        for (i, j), rows in itertools.groupby(pairs.rows.tolist(), lambda row: (row[0], row[2])):
            one, other = mine[i], theirs[j]
            a, b = values[0].of(one), values[1].of(other)
            _, ra, _, rb = np.array(list(rows)).T
            if one.form == DIGEST:
                self._compare_digests(one, a, b, ra, rb)
            elif one.form == ROWS and (is_single(one, a) or is_single(other, b)):
                if not (is_single(one, a) and is_single(other, b)):
                    self._remark = "one value a row on one side, one a token on the other"
                x, y = single_values(one, a, ra), single_values(other, b, rb)
                self._compare_singles(one, x, y, ra)
            else:
                self._compare_parts(one, other, a, b, ra, rb)
        unpaired = pairs.only_a, pairs.only_b
        if not any(unpaired):
            return self._result(mine)
        note = "{} rows only in A, {} only in B".format(*unpaired)
        state = DIFFERS if self._off else UNPAIRED
        self._compared += max(unpaired)
        return self._result(mine, state, note=note)

    def _compare_numbers(self, one: Record, other: Record) -> None:
        if isinstance(one.number, str) or isinstance(other.number, str):
            self._compared += 1
            if one.number != other.number:
                self._note(one, -1, None, np.inf, one.number, other.number)
                self._off += 1
            return
        a, b = (np.array([record.number]) for record in (one, other))
        self._dtypes = one.dtype, other.dtype
        self._add(one, -1, a, b, self._a.tokens)

    def _compare_parts(
        self, one: Record, other: Record, a: np.ndarray, b: np.ndarray, ra: Any, rb: Any
    ) -> None:
        lengths = self._lengths(one, ra)
        for i, j, n in zip(ra.tolist(), rb.tolist(), lengths, strict=True):
            mine, theirs = one.layout.part(a, i), other.layout.part(b, j)
            if mine.shape == theirs.shape:
                self._add(one, i, mine, theirs, n)
            else:
                self._compared += 1
                self._off += 1
                self._note(one, i, None, np.inf, list(mine.shape), list(theirs.shape), "shape")

    def _compare_singles(self, one: Record, a: np.ndarray, b: np.ndarray, rows: np.ndarray) -> None:
        """One value for each of the record's `rows`, all at once."""
        x, y = _wide(a), _wide(b)
        gaps = _gaps(a, b)
        lengths = np.array(self._lengths(one, rows), np.float64)
        allowed = self._rounding.allowed(x, y, self._dtypes, 1, scale(x))
        if not self._rounding.is_given:
            allowed = allowed * np.sqrt(lengths)
        self._compared += len(x)
        beyond = gaps > allowed
        self._off += int(beyond.sum())
        self._rounded += int((((gaps > 0) | other_zeros(x, y)) & ~beyond).sum())
        if len(gaps) and gaps.max() > 0:
            k = int(gaps.argmax())
            self._note(one, int(rows[k]), None, float(gaps[k]), a[k], b[k], off=bool(beyond.any()))

    def _compare_digests(self, one: Record, a: Any, b: Any, ra: Any, rb: Any) -> None:
        other = np.flatnonzero(is_other := a["checksums"][ra] != b["checksums"][rb])
        self._compared += len(ra)
        if self._dtypes[0] == self._dtypes[1]:  # those of whole numbers are not those of floats
            self._rounded += int(((a["bits"][ra] != b["bits"][rb]) & ~is_other).sum())
        lengths = self._lengths(one, ra)
        for k in other.tolist():
            mine, theirs = a["moments"][ra[k]], b["moments"][rb[k]]
            gaps = differences(mine, theirs)
            if not gaps.any() and self._dtypes[0] != self._dtypes[1]:
                continue  # whole numbers and floats
            # What a mean may be off by is a share of its terms, which may cancel.
            x, y = (
                np.where(_MEANS, np.fmax(np.abs(some), some[2]), some) for some in (mine, theirs)
            )
            around = float(np.nan_to_num(mine[2]))
            allowed = self._rounding.allowed(x, y, self._dtypes, int(lengths[k]), around)
            beyond = bool((gaps > allowed).any() or gaps[0] or not gaps.any())
            self._off += beyond
            self._rounded += not beyond
            m = 0 if gaps[0] else int(np.argmax(gaps))
            values = float(mine[m]), float(theirs[m])
            self._note(one, int(ra[k]), None, float(gaps[m]), *values, MOMENTS[m], off=beyond)

    def _add(self, one: Record, row: int, a: np.ndarray, b: np.ndarray, n: int) -> None:
        """A part of a row, or a value of the whole step."""
        self._compared += 1
        if a.dtype == b.dtype and a.tobytes() == b.tobytes():
            return
        x, y = _wide(a), _wide(b)
        gaps = _gaps(a, b)
        if not gaps.any():
            self._rounded += bool(other_zeros(x, y).any())
            return
        allowed = self._rounding.allowed(x, y, self._dtypes, n, scale(x))
        beyond = bool((gaps > allowed).any())
        self._off += beyond
        self._rounded += not beyond
        at = np.unravel_index(int(gaps.argmax()), gaps.shape)
        entry = int(at[0]) if gaps.size > 1 else None
        self._note(one, row, entry, float(gaps[at]), a[at], b[at], off=beyond)

    def _note(
        self, one: Record, row: int, entry: int | None, gap: float, a: Any, b: Any,
        what: str | None = None, *, off: bool = True,
    ) -> None:  # fmt: skip
        """Keep the largest difference of the first record that differs beyond rounding."""
        self._largest = max(self._largest, gap)
        if off and self._first is None:
            self._first, self._worst = one.order, None
        is_of_first = self._first is None or one.order == self._first
        if is_of_first and (self._worst is None or gap > self._worst[0]):
            self._worst = gap, one, row, entry, _plain(a), _plain(b), what

    def _lengths(self, one: Record, rows: np.ndarray) -> list[int]:
        """Tokens of each row."""
        if one.keys is None or self._a.rows is None:
            return [1] * len(rows)
        found = self._a.rows.lengths[self._a.rows.find(one.keys[rows])]
        return found.tolist()  # type: ignore[no-any-return]

    def _result(
        self, mine: Sequence[Record], state: str = "", unit: str = "rows", note: str = ""
    ) -> StageResult:
        if not state:
            state = DIFFERS if self._off else ROUNDING if self._rounded else EQUAL
        note = note or self._remark
        if state == EQUAL and self._dtypes[0] != self._dtypes[1] and not note:
            note = "equal numbers in two dtypes"
        return StageResult(
            self._step,
            self._name,
            state,
            mine[0].order if self._first is None else self._first,
            len(mine),
            unit,
            self._compared,
            self._off,
            self._largest,
            self._dtypes,
            note,
            self._place(),
        )

    def _place(self) -> Place | None:
        if self._worst is None:
            return None
        _, one, row, entry, a, b, what = self._worst
        if one.keys is None or self._a.rows is None:
            return Place(a, b, what, entry=entry)
        at = int(self._a.rows.find(one.keys[row]))
        name, token, around = name_of(self._a.rows, at), None, None
        found = None if what is not None else self._a.tokens_of(at)
        if found is not None and one.layout.align is not None:
            prompt_length = int(self._a.rows.prompt_lengths[at])
            places = token_places(one.layout.align, (entry or 0) + 1, prompt_length, found[1])
            if len(places) > (entry or 0):
                token, around = int(places[-1]), around_token(found[0], int(places[-1]))
        return Place(a, b, what, name, entry, token, around)


def _gaps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How far values are apart; at least 1 for whole numbers that are one in float64."""
    found = differences(_wide(a), _wide(b))
    are_whole = a.dtype.kind in "iu" and b.dtype.kind in "iu"
    return np.maximum(found, a != b) if are_whole else found


def _wide(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float64)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
