"""One step of two jobs compared, stage by stage: the rollouts are the first."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np

from rlskip._human import counted
from rlskip.batch.rows import token_places
from rlskip.compare.records import HASHED, Pair, Record, StepRecords, pair_rows
from rlskip.compare.rounding import Rounding, differences, scale
from rlskip.compare.verdict import (
    DIFFERS,
    EQUAL,
    ROLLOUTS,
    ROUNDING,
    UNPAIRED,
    Place,
    StageResult,
    StepResult,
)
from rlskip.stages.parts import DIGEST, MOMENTS, ROWS

_AROUND = 8  # tokens that are shown on each side of one


def compare_step(step: int, a: StepRecords, b: StepRecords, rounding: Rounding) -> StepResult:
    """Compare what two jobs recorded at a step; raises DumpError where a value cannot be read."""
    both = {name: (a.stages[name], b.stages[name]) for name in a.stages if name in b.stages}
    of_rows = [n for n, pair in both.items() if all(one.has_rows for some in pair for one in some)]
    mine, theirs = a.rollouts(of_rows), b.rollouts(of_rows)
    rollouts = zip(mine, theirs, strict=True) if mine and theirs else ()
    pairs = *rollouts, *both.values()
    found = [_compare_stage(step, a, one, other, rounding) for one, other in pairs]
    only_a, only_b = ([n for n in x.stages if n not in y.stages] for x, y in ((a, b), (b, a)))
    return StepResult(step, found, only_a, only_b)


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
    pairs: list[Pair] = [(i, 0, i, 0) for i in range(len(mine))]
    only_a, only_b = list[tuple[int, int]](), list[tuple[int, int]]()
    if one.has_rows:
        pairs, only_a, only_b = pair_rows(mine, theirs)
    elif len(mine) != len(theirs):
        return attrs.evolve(result, note=f"{counted(len(mine), 'record')} in A, {len(theirs)} in B")
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
    note, alone = "", max(len(only_a), len(only_b))
    if alone:
        note = f"{counted(len(only_a), 'row')} only in A, {len(only_b)} only in B"
        if one.name == ROLLOUTS:  # of another stage it follows from that
            off += alone
        state = DIFFERS if off else UNPAIRED
        if worst is None and only_a:
            worst = 0.0, mine[only_a[0][0]], only_a[0][1], Place()
    elif state == EQUAL and dtypes[0] != dtypes[1]:
        note = "equal numbers in two dtypes"
    return attrs.evolve(
        result, state=state, order=one.order if first is None else first, off=off, largest=largest,
        compared=len(pairs) + alone, note=note, at=worst and _where(a, *worst[1:]),
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
        terms = [0 if a.rows is None else int(a.rows.lengths.sum())]  # the tokens of all rows
        if one.keys is not None and a.rows is not None:
            terms = a.rows.lengths[a.rows.find(one.keys)].tolist()
        for _, row, _, other_row in rows:
            allowed = partial(rounding.allowed, dtypes=dtypes, n=terms[row])
            if one.form == HASHED:
                gap = _gap_of_hashed(x, row, y, other_row)
            elif one.form == DIGEST:
                gap = _gap_of_digests(_digest(x, row), _digest(y, other_row), dtypes, allowed)
            else:
                gap = _gap(one.part(x, row), other.part(y, other_row), allowed, around)
            if gap is not None:
                yield one, row, gap


def _gap_of_hashed(a: Any, row: int, b: Any, other_row: int) -> _Gap | None:
    """Where two rows first differ: tokens are names, and not more or less apart."""
    (hashes, entries), (other_hashes, other_entries) = a, b
    if hashes[row] == other_hashes[other_row]:
        return None
    x, y = entries(row), other_entries(other_row)
    # A mask that does not fit its tokens is not that of which nothing was sampled.
    if x is None or y is None or np.array_equal(x, y):
        return 0.0, True, Place()
    upto = min(len(x), len(y))
    at = next(iter(np.flatnonzero(x[:upto] != y[:upto]).tolist()), upto)
    one, two = (some[at].item() if at < len(some) else None for some in (x, y))
    return 0.0, True, Place(one, two, token=at)


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
    if not gaps.any():  # 0.0 and -0.0 are equal numbers, but not to the bit
        return (0.0, False, Place()) if (np.signbit(x) != np.signbit(y))[x == 0].any() else None
    at = np.unravel_index(int(gaps.argmax()), gaps.shape)
    off = bool((gaps > allowed(x, y, around=scale(x) if around is None else around)).any())
    entry = int(at[0]) if gaps.size > 1 else None
    return float(gaps[at]), off, Place(a[at].item(), b[at].item(), entry=entry)


def _gap_of_digests(
    a: Sequence[Any], b: Sequence[Any], dtypes: tuple[str, str], allowed: Callable[..., np.ndarray]
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


def _digest(value: Any, row: int) -> list[Any]:
    return [value[name][row] for name in ("checksums", "bits", "moments")]


def _where(a: StepRecords, one: Record, row: int, place: Place) -> Place:
    """The place, in the row of A's record that it is of, with the tokens around its token."""
    if one.keys is None or a.rows is None:
        return place
    at, align = int(a.rows.find(one.keys[row])), one.layout.align
    token, around, tokens = place.token, None, None
    if token is not None or (align is not None and place.what is None):
        tokens = a.tokens_of(at)
    if align is not None and place.what is None and tokens is not None:
        entry, prompt_length = place.entry or 0, int(a.rows.prompt_lengths[at])
        places = token_places(align, entry + 1, prompt_length, tokens[1])
        token = int(places[-1]) if len(places) > entry else None
    if token is not None and tokens is not None:
        start = max(0, token - _AROUND)
        around = tokens[0][start : token + _AROUND + 1].tolist(), token - start
    return attrs.evolve(place, row=a.rows.name(at), token=token, around=around)
