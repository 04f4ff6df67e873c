"""One step of two jobs compared: rollouts first, then stage by stage."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlskip.batch.row_parts import token_places
from rlskip.compare.records import (
    Record,
    StepRecords,
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
    """Compare what two jobs recorded at a step; raises DumpError where a value cannot be read."""
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
    mine, theirs = copies(a, b)
    only_a, only_b = mine - theirs, theirs - mine
    off = max(only_a.total(), only_b.total())
    rollouts = StageResult(
        step, ROLLOUTS, DIFFERS if off else EQUAL, -2,
        compared=(mine & theirs).total() + off, off=off,
        note=f"{only_a.total()} rows only in A, {only_b.total()} only in B" if off else "",
        at=_first_other_token(a, b, sorted(only_a), sorted(only_b)) if off else None,
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
    a: StepRecords, b: StepRecords, of_a: Sequence[int], of_b: Sequence[int]
) -> Place | None:
    """Where a row that A has more often, with a key `of_a`, first differs from one `of_b` with the
    same prompt."""
    assert a.rows is not None
    assert b.rows is not None
    mine = a.rows.find(np.array(of_a, np.uint64))
    theirs = b.rows.find(np.array(of_b, np.uint64))
    for i in mine.tolist():
        alike = theirs[b.rows.prompts[theirs] == a.rows.prompts[i]]
        if not len(alike):
            continue
        is_same = (b.rows.sessions[alike] == a.rows.sessions[i]) & (
            b.rows.turns[alike] == a.rows.turns[i]
        )
        ours, others = a.tokens_of(i), b.tokens_of(int(alike[is_same.argmax()]))
        if ours is None or others is None:
            break
        x, y = ours[0], others[0]
        upto = min(len(x), len(y))
        at = next(iter(np.flatnonzero(x[:upto] != y[:upto]).tolist()), upto)
        one, two = (int(row[at]) if at < len(row) else None for row in (x, y))
        return Place(one, two, row=name_of(a.rows, i), token=at, around=around_token(x, at))
    else:
        i = next(iter(mine.tolist()), None)
    return None if i is None else Place(None, None, row=name_of(a.rows, i))


def _first_other_mask(a: StepRecords, b: StepRecords, i: np.ndarray, j: np.ndarray) -> Place | None:
    assert a.rows is not None
    name = name_of(a.rows, int(i[0]))
    ours, others = a.tokens_of(int(i[0])), b.tokens_of(int(j[0]))
    # A mask that does not fit its tokens is not that of which nothing was sampled.
    if ours is None or others is None or np.array_equal(ours[1], others[1]):
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
        for one, other in zip(mine, theirs, strict=True):
            self._dtypes = one.dtype, other.dtype
            if isinstance(one.number, str) or isinstance(other.number, str):
                self._compared += 1
                if one.number != other.number:
                    self._note(one, -1, None, np.inf, one.number, other.number)
            elif one.form == NUMBER:
                a, b = np.array([one.number]), np.array([other.number])
                self._judge(one, -1, a, b, self._a.tokens)
            elif one.form == DIGEST:
                self._judge_digest(one, -1, _digest_at(one.load(), 0), _digest_at(other.load(), 0))
            else:
                self._judge(one, -1, one.load(), other.load(), self._a.tokens)
        return self._result(mine, unit="values")

    def _compare_rows(self, mine: Sequence[Record], theirs: Sequence[Record]) -> StageResult:
        pairs, *unpaired = pair_rows(mine, theirs)
        value_of = functools.cache(Record.load)  # rows of one record may be in several
        for (i, j), rows in itertools.groupby(pairs, lambda row: (row[0], row[2])):
            one, other = mine[i], theirs[j]
            a, b = value_of(one), value_of(other)
            _, ra, _, rb = np.array(list(rows)).T
            are_single = one.form == ROWS and (is_single(one, a), is_single(other, b))
            if are_single and any(are_single):
                if not all(are_single):
                    self._remark = "one value a row on one side, one a token on the other"
                a, b = single_values(one, a, ra), single_values(other, b, rb)
            around = scale(_wide(a)) if are_single and any(are_single) else None
            for k, (x, y) in enumerate(zip(ra.tolist(), rb.tolist(), strict=True)):
                if one.form == DIGEST:
                    self._judge_digest(one, x, _digest_at(a, x), _digest_at(b, y))
                elif around is not None:
                    n = self._length(one, x)
                    self._judge(one, x, a[k : k + 1], b[k : k + 1], n, around)
                else:
                    parts = one.layout.part(a, x), other.layout.part(b, y)
                    self._judge(one, x, *parts, self._length(one, x))
        if not any(unpaired):
            return self._result(mine)
        note = "{} rows only in A, {} only in B".format(*unpaired)
        state = DIFFERS if self._off else UNPAIRED
        self._compared += max(unpaired)
        return self._result(mine, state, note=note)

    def _judge(
        self, one: Record, row: int, a: np.ndarray, b: np.ndarray, n: int,
        around: float | None = None,
    ) -> None:  # fmt: skip
        """A row's part or its only value, or a value of the whole step.

        `around` is the scale of the values around it, by default its own.
        """
        self._compared += 1
        if a.shape != b.shape:
            self._note(one, row, None, np.inf, list(a.shape), list(b.shape), "shape")
            return
        if a.dtype == b.dtype and a.tobytes() == b.tobytes():
            return
        x, y = _wide(a), _wide(b)
        gaps = differences(x, y)
        if a.dtype.kind in "iu" and b.dtype.kind in "iu":  # they may be one number in float64
            gaps = np.maximum(gaps, a != b)
        if not gaps.any():
            self._rounded += bool(other_zeros(x, y).any())
            return
        around = scale(x) if around is None else around
        allowed = self._rounding.allowed(x, y, self._dtypes, n, around)
        at = np.unravel_index(int(gaps.argmax()), gaps.shape)
        entry = int(at[0]) if gaps.size > 1 else None
        off = bool((gaps > allowed).any())
        self._note(one, row, entry, float(gaps[at]), a[at], b[at], off=off)

    def _judge_digest(self, one: Record, row: int, a: _Digest, b: _Digest) -> None:
        self._compared += 1
        (checksum, bits, mine), (other_checksum, other_bits, theirs) = a, b
        # Whole numbers and floats have other checksums and bits.
        is_one_dtype = self._dtypes[0] == self._dtypes[1]
        if checksum == other_checksum:
            self._rounded += is_one_dtype and bits != other_bits
            return
        gaps = differences(mine, theirs)
        if not gaps.any() and not is_one_dtype:
            return
        # What a mean may be off by is a share of its terms, which may cancel.
        x, y = (np.where(_MEANS, np.fmax(np.abs(some), some[2]), some) for some in (mine, theirs))
        around, n = float(np.nan_to_num(mine[2])), self._length(one, row)
        allowed = self._rounding.allowed(x, y, self._dtypes, n, around)
        off = bool((gaps > allowed).any() or gaps[0] or not gaps.any())
        m = 0 if gaps[0] else int(np.argmax(gaps))
        values = float(mine[m]), float(theirs[m])
        self._note(one, row, None, float(gaps[m]), *values, MOMENTS[m], off=off)

    def _note(
        self, one: Record, row: int, entry: int | None, gap: float, a: Any, b: Any,
        what: str | None = None, *, off: bool = True,
    ) -> None:  # fmt: skip
        """Count a difference; keep the largest of the first record that has one beyond rounding."""
        self._off += off
        self._rounded += not off
        self._largest = max(self._largest, gap)
        if off and self._first is None:
            self._first, self._worst = one.order, None
        is_of_first = self._first is None or one.order == self._first
        if is_of_first and (self._worst is None or gap > self._worst[0]):
            self._worst = gap, one, row, entry, _plain(a), _plain(b), what

    def _length(self, one: Record, row: int) -> int:
        """Tokens of a row."""
        if one.keys is None or self._a.rows is None:
            return 1
        return int(self._a.rows.lengths[self._a.rows.find(one.keys[row])])

    def _result(
        self, mine: Sequence[Record], state: str = "", unit: str = "rows", note: str = ""
    ) -> StageResult:
        if not state:
            state = DIFFERS if self._off else ROUNDING if self._rounded else EQUAL
        note = note or self._remark
        if state == EQUAL and self._dtypes[0] != self._dtypes[1] and not note:
            note = "equal numbers in two dtypes"
        order = mine[0].order if self._first is None else self._first
        return StageResult(
            self._step, self._name, state, order, unit, self._compared, self._off,
            self._largest, self._dtypes, note, self._place(),
        )  # fmt: skip

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


_Digest = tuple[Any, Any, np.ndarray]
"""Of one row the checksum, the bits and the moments."""


def _digest_at(value: Any, row: int) -> _Digest:
    return value["checksums"][row], value["bits"][row], value["moments"][row]


def _wide(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float64)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
