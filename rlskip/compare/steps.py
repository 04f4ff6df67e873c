"""One step of two jobs compared: rollouts first, then stage by stage."""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np

from rlskip.batch.row_parts import token_places
from rlskip.compare.records import Record, StepRecords
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
)
from rlskip.stages.digest import MOMENTS
from rlskip.stages.parts import DIGEST, ROWS


def compare_step(step: int, a: StepRecords, b: StepRecords, rounding: Rounding) -> StepResult:
    """Compare what two jobs recorded at a step; raises DumpError where a value cannot be read."""
    found = _compare_rollouts(step, a, b)
    for name, mine in a.stages.items():
        if name in b.stages:
            found.append(_compare_stage(step, a, mine, b.stages[name], rounding))
    only_a, only_b = ([n for n in x.stages if n not in y.stages] for x, y in ((a, b), (b, a)))
    return StepResult(step, found, only_a, only_b)


# -- the rows themselves -------------------------------------------------------------------------


def _compare_rollouts(step: int, a: StepRecords, b: StepRecords) -> list[StageResult]:
    if a.rows is None or b.rows is None:
        return []
    mine, theirs = _copies(a, b)
    only_a, only_b = mine - theirs, theirs - mine
    off = max(only_a.total(), only_b.total())
    rollouts = StageResult(step, ROLLOUTS, EQUAL, -2, compared=(mine & theirs).total() + off)
    if off:
        note = f"{only_a.total()} rows only in A, {only_b.total()} only in B"
        at = _first_other_token(a, b, sorted(only_a), sorted(only_b))
        rollouts = attrs.evolve(rollouts, state=DIFFERS, off=off, note=note, at=at)
    both, i, j = np.intersect1d(a.rows.keys, b.rows.keys, return_indices=True)
    if not len(both):
        return [rollouts]
    other = np.flatnonzero(a.rows.masks[i] != b.rows.masks[j])
    mask = StageResult(step, MASK, EQUAL, -1, compared=len(both), off=len(other))
    if len(other):
        at = _first_other_mask(a, b, int(i[other[0]]), int(j[other[0]]))
        note = "which tokens were sampled"
        mask = attrs.evolve(mask, state=DIFFERS, largest=1.0, note=note, at=at)
    return [rollouts, mask]


def _copies(a: StepRecords, b: StepRecords) -> list[Counter[int]]:
    """How many rows of each key there are in A, and in B, which both have rows.

    A stage may have all of them once an epoch: of the stages of rows that both recorded, the one
    with the fewest tells; and each row that is described is there once.
    """
    shared = a.stages.keys() & b.stages.keys()
    named = [n for n in shared if all(one.has_rows for one in (*a.stages[n], *b.stages[n]))]
    found: list[Counter[int]] = []
    for side in (a, b):
        assert side.rows is not None
        every: list[Counter[int]] = [
            Counter(key for key, _ in _named_rows(side.stages[name]).values()) for name in named
        ]
        fewest: Counter[int] = functools.reduce(operator.and_, every) if every else Counter[int]()
        once: Counter[int] = Counter(side.rows.keys.tolist())
        found.append(fewest | once)
    return found


def _first_other_token(
    a: StepRecords, b: StepRecords, of_a: Sequence[int], of_b: Sequence[int]
) -> Place | None:
    """Where a row that A has more often, with a key `of_a`, first differs from one `of_b` with the
    same prompt."""
    assert a.rows is not None
    assert b.rows is not None
    mine, theirs = a.rows.find(of_a), b.rows.find(of_b)
    for i in mine.tolist():
        alike = theirs[b.rows.prompts[theirs] == a.rows.prompts[i]]
        if not len(alike):
            continue
        is_same = (b.rows.sessions[alike] == a.rows.sessions[i]) & (
            b.rows.turns[alike] == a.rows.turns[i]
        )
        ours, others = a.tokens_of(i), b.tokens_of(int(alike[is_same.argmax()]))
        if ours is None or others is None:
            return a.where(Place(), i)
        x, y = ours[0], others[0]
        upto = min(len(x), len(y))
        at = next(iter(np.flatnonzero(x[:upto] != y[:upto]).tolist()), upto)
        one, two = (int(row[at]) if at < len(row) else None for row in (x, y))
        return a.where(Place(one, two), i, at)
    return a.where(Place(), int(mine[0])) if len(mine) else None


def _first_other_mask(a: StepRecords, b: StepRecords, i: int, j: int) -> Place:
    ours, others = a.tokens_of(i), b.tokens_of(j)
    # A mask that does not fit its tokens is not that of which nothing was sampled.
    if ours is None or others is None or np.array_equal(ours[1], others[1]):
        return a.where(Place(), i)
    at = int(np.flatnonzero(ours[1] != others[1])[0])
    return a.where(Place(bool(ours[1][at]), bool(others[1][at])), i, at)


# -- which rows of two stages belong together, wherever the batches put them --------------------


Pair = tuple[int, int, int, int]
"""The record and the row in it, of A, then of B."""


def pair_rows(a: Sequence[Record], b: Sequence[Record]) -> tuple[list[Pair], int, int]:
    """Rows of A and of B that are the same row, and how many rows each has that the other lacks.

    Rows with equal tokens are paired, first those of one session where both sides number sessions:
    the same session may have another number in the other run. Where a row was recorded several
    times, or several sessions have the same tokens, the first is paired with the first.
    """
    mine, theirs = _named_rows(a), _named_rows(b)
    pairs: list[Pair] = []
    by_session = all(record.sessions is not None for record in (*a, *b))
    for parts in (2, 1) if by_session else (1,):  # of the name: key and session, or the key
        waiting: dict[Any, deque[tuple[int, int]]] = defaultdict(deque)
        for place, name in theirs.items():
            waiting[name[:parts]].append(place)
        for place, name in [*mine.items()]:
            if same := waiting[name[:parts]]:
                pairs.append((*place, *same[0]))
                del mine[place], theirs[same.popleft()]
    return sorted(pairs), len(mine), len(theirs)


def _named_rows(records: Sequence[Record]) -> dict[tuple[int, int], tuple[int, int | None]]:
    """Key and session of each row of a stage, by the record and the place in it."""
    found: dict[tuple[int, int], tuple[int, int | None]] = {}
    for number, record in enumerate(records):
        assert record.keys is not None
        keys, given = record.keys.tolist(), record.sessions
        sessions = [None] * len(keys) if given is None else given.tolist()
        for row, name in enumerate(zip(keys, sessions, strict=True)):
            found[number, row] = name
    return found


# -- a stage -------------------------------------------------------------------------------------


_Gap = tuple[float, bool, Place]
"""How far two values are apart that are not equal to the bit, whether that is beyond rounding, and
where it is most."""


def _compare_stage(
    step: int, a: StepRecords, mine: Sequence[Record], theirs: Sequence[Record], rounding: Rounding
) -> StageResult:
    one, dtypes = mine[0], (mine[0].dtype, theirs[0].dtype)
    unit = "rows" if one.has_rows else "values"
    result = StageResult(step, one.name, UNPAIRED, one.order, unit, dtypes=dtypes)
    forms = {(record.form, record.has_rows) for record in (*mine, *theirs)}
    if len(forms) > 1:
        kinds = " and ".join(sorted({form for form, _ in forms}))
        return attrs.evolve(result, note=f"recorded in two forms: {kinds}")
    pairs, only_a, only_b = [(i, 0, i, 0) for i in range(len(mine))], 0, 0
    if one.has_rows:
        pairs, only_a, only_b = pair_rows(mine, theirs)
    elif len(mine) != len(theirs):
        return attrs.evolve(result, note=f"{len(mine)} records in A, {len(theirs)} in B")
    off, state, largest = 0, EQUAL, 0.0
    # The first record that differs beyond rounding, and the largest difference of that record.
    first: int | None = None
    worst: tuple[float, Record, int, Place] | None = None
    for record, row, (size, is_off, place) in _gaps(pairs, mine, theirs, a, rounding):
        off, largest = off + is_off, max(largest, size)
        state = DIFFERS if off else ROUNDING
        if is_off and first is None:
            first, worst = record.order, None
        if first in (None, record.order) and (worst is None or size > worst[0]):
            worst = size, record, row, place
    note = ""
    if only_a or only_b:
        note, state = f"{only_a} rows only in A, {only_b} only in B", DIFFERS if off else UNPAIRED
    elif state == EQUAL and dtypes[0] != dtypes[1]:
        note = "equal numbers in two dtypes"
    return attrs.evolve(
        result, state=state, order=one.order if first is None else first, off=off, largest=largest,
        compared=len(pairs) + max(only_a, only_b), note=note, at=worst and _where(a, *worst[1:]),
    )  # fmt: skip


def _gaps(
    pairs: list[Pair],
    mine: Sequence[Record],
    theirs: Sequence[Record],
    a: StepRecords,
    rounding: Rounding,
) -> Iterator[tuple[Record, int, _Gap]]:
    """The record of A, the row in it, and the gap, of each pair that is not equal to the bit."""
    value_of = functools.cache(lambda record: record.load())  # its rows may be in several records
    for (i, j), rows in itertools.groupby(pairs, lambda pair: (pair[0], pair[2])):
        one, other, around = mine[i], theirs[j], None
        dtypes, x, y = (one.dtype, other.dtype), value_of(one), value_of(other)
        if one.form == ROWS and one.is_single(x):  # a number has the scale of the others
            around = scale(x.astype(np.float64))
        for _, row, _, other_row in rows:
            if one.keys is None or a.rows is None:
                n = a.tokens
            else:
                n = int(a.rows.lengths[a.rows.find(one.keys[row])])
            allowed = partial(rounding.allowed, dtypes=dtypes, n=n)
            if one.form == DIGEST:
                gap = _gap_of_digests(_digest(x, row), _digest(y, other_row), dtypes, allowed)
            else:
                gap = _gap(one.part(x, row), other.part(y, other_row), allowed, around)
            if gap is not None:
                yield one, row, gap


def _gap(
    a: np.ndarray, b: np.ndarray, allowed: Callable[..., np.ndarray], around: float | None
) -> _Gap | None:
    if a.shape != b.shape:
        return np.inf, True, Place(list(a.shape), list(b.shape), "shape")
    if a.dtype == b.dtype and a.tobytes() == b.tobytes():
        return None
    if "U" in (a.dtype.kind, b.dtype.kind):
        x, y = a.item(), b.item()
        return None if x == y else (np.inf, True, Place(x, y))
    x, y = a.astype(np.float64), b.astype(np.float64)
    gaps = differences(x, y)
    if a.dtype.kind in "iu" and b.dtype.kind in "iu":  # they may be one number in float64
        gaps = np.maximum(gaps, a != b)
    if not gaps.any():
        return (0.0, False, Place()) if other_zeros(x, y).any() else None
    at = np.unravel_index(int(gaps.argmax()), gaps.shape)
    off = bool((gaps > allowed(x, y, around=scale(x) if around is None else around)).any())
    entry = int(at[0]) if gaps.size > 1 else None
    return float(gaps[at]), off, Place(a[at].item(), b[at].item(), entry=entry)


def _gap_of_digests(
    a: _Digest, b: _Digest, dtypes: tuple[str, str], allowed: Callable[..., np.ndarray]
) -> _Gap | None:
    (checksum, bits, mine), (other_checksum, other_bits, theirs) = a, b
    # Whole numbers and floats have other checksums and bits.
    is_one_dtype = dtypes[0] == dtypes[1]
    if checksum == other_checksum:
        return (0.0, False, Place()) if is_one_dtype and bits != other_bits else None
    gaps = differences(mine, theirs)
    if not gaps.any() and not is_one_dtype:
        return None
    # What a mean may be off by is a share of its terms, which may cancel.
    x, y = (np.where(_MEANS, np.fmax(np.abs(some), some[2]), some) for some in (mine, theirs))
    limit = allowed(x, y, around=float(np.nan_to_num(mine[2])))
    off = bool((gaps > limit).any() or gaps[0] or not gaps.any())
    m = 0 if gaps[0] else int(np.argmax(gaps))
    return float(gaps[m]), off, Place(float(mine[m]), float(theirs[m]), MOMENTS[m])


_MEANS = np.array([name in ("mean", "order") for name in MOMENTS])
_Digest = tuple[Any, Any, np.ndarray]
"""Of one row the checksum, the bits and the moments."""


def _digest(value: Any, row: int) -> _Digest:
    return value["checksums"][row], value["bits"][row], value["moments"][row]


def _where(a: StepRecords, one: Record, row: int, place: Place) -> Place:
    """The place, in the row of A's record that it is of."""
    if one.keys is None or a.rows is None:
        return place
    at, token = int(a.rows.find(one.keys[row])), None
    tokens = None if place.what is not None else a.tokens_of(at)
    if tokens is not None and one.layout.align is not None:
        entry, prompt_length = place.entry or 0, int(a.rows.prompt_lengths[at])
        places = token_places(one.layout.align, entry + 1, prompt_length, tokens[1])
        token = int(places[-1]) if len(places) > entry else None
    return a.where(place, at, token)
