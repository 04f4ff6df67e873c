"""What a stage returned, compared with the dump that replaces it (``action: verify``)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlskip.batch.columns import cells_of, columns_of, rows_of
from rlskip.batch.ragged import numbers
from rlskip.batch.row_fields import RowFields
from rlskip.batch.rows import RecordError, RowColumns, Rows, by_token
from rlskip.format.fingerprint import VOLATILE, fingerprint
from rlskip.jobs.verified import Verified
from rlskip.store import UnsupportedTypeError


def compare(then: Any, now: Any, fields: RowFields) -> Verified:
    """Compare rollouts of a dump with what the stage returned for the same prompts.

    Rows with equal tokens belong together, wherever they are; of the others the first of a prompt
    in the dump belongs to the first of it now. A result without tokens is compared by its values,
    row by row, as far as both have them.

    Parameters
    ----------
    then, now
        The dump's rollouts and the stage's.
    fields
        What their fields hold.
    """
    try:
        a, b = (Rows.of(RowColumns.of(batch, fields)) for batch in (then, now))
    except RecordError:
        return _compare_values(then, now)
    pairs = _pairs(a, b)
    same = sum(a.keys[i] == b.keys[j] for i, j in pairs)
    gaps = _log_prob_gaps(_log_probs(then, a, fields), _log_probs(now, b, fields), a, b, pairs)
    return Verified(
        calls=1,
        rows=max(len(a), len(b)),
        same=int(same),
        rows_then=len(a),
        rows_now=len(b),
        tokens_then=_response_tokens(a),
        tokens_now=_response_tokens(b),
        log_probs=gaps.size,
        log_prob_sum=float(gaps.sum()),
        log_prob_gap=float(gaps.max(initial=0.0)),
        first=_first_difference(a, b, pairs),
    )


def _pairs(a: Rows, b: Rows) -> list[tuple[int, int]]:
    """Rows of `a` with their counterparts in `b`, in the order of `a`."""
    found: dict[int, int] = {}
    for of_a, of_b in ((a.keys, b.keys), (a.prompts, b.prompts)):
        taken = {*found.values()}
        waiting: dict[int, deque[int]] = defaultdict(deque)
        for j, name in enumerate(of_b.tolist()):
            if j not in taken:
                waiting[name].append(j)
        for i, name in enumerate(of_a.tolist()):
            if i not in found and waiting[name]:
                found[i] = waiting[name].popleft()
    return sorted(found.items())


def _first_difference(a: Rows, b: Rows, pairs: Sequence[tuple[int, int]]) -> str:
    paired = dict(pairs)
    for i in range(len(a)):
        if i not in paired:
            return f"row {i}: the stage returned no such row"
        if a.keys[i] != b.keys[paired[i]]:
            at = _same_tokens(a.tokens[i], b.tokens[paired[i]])
            tokens = a.tokens[i], b.tokens[paired[i]]
            then, now = (str(row[at]) if at < len(row) else "the end" for row in tokens)
            return f"row {i}, token {at}: {then} in the dump, {now} now"
    extra = sorted({*range(len(b))} - {*paired.values()})
    return f"the dump has no counterpart of row {extra[0]}" if extra else ""


def _same_tokens(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens are equal before the first that differs."""
    upto = min(len(a), len(b))
    other = np.flatnonzero(a[:upto] != b[:upto])
    return int(other[0]) if len(other) else upto


def _response_tokens(rows: Rows) -> int:
    return sum(map(len, rows.tokens)) - int(rows.prompt_lengths.sum())


def _log_probs(batch: Any, rows: Rows, fields: RowFields) -> list[np.ndarray] | None:
    """The log-probs of each row by token, NaN where there is none; None if the batch has none."""
    column = columns_of(batch).get(fields.log_probs)
    cells = None if column is None else cells_of(column, len(rows))
    parts = [part.astype(float) for cell in cells or () if (part := numbers(cell)) is not None]
    if not parts or len(parts) < len(rows):
        return None
    lengths = [len(part) for part in parts]
    is_padded = len({*lengths}) == 1
    try:
        if is_padded:
            layout = rows.layout_of((len(parts), lengths[0]))
        else:
            layout = rows.layout_of((sum(lengths),), lengths)
    except RecordError:
        return None
    if is_padded and layout.spans is not None:
        spans = layout.spans.tolist()
        parts = [part[start:end] for part, (start, end) in zip(parts, spans, strict=True)]
    prompts = rows.prompt_lengths.tolist()
    named = zip(parts, prompts, rows.sampled, strict=True)
    return [by_token(part, layout.align, prompt, sampled) for part, prompt, sampled in named]


def _log_prob_gaps(
    then: list[np.ndarray] | None,
    now: list[np.ndarray] | None,
    a: Rows,
    b: Rows,
    pairs: Sequence[tuple[int, int]],
) -> np.ndarray:
    """The absolute differences of log-probs before the first token that differs."""
    if then is None or now is None:
        return np.empty(0)
    gaps = []
    for i, j in pairs:
        upto = _same_tokens(a.tokens[i], b.tokens[j])
        gaps.append(np.abs(then[i][:upto] - now[j][:upto]))
    found = np.concatenate(gaps or [np.empty(0)])
    return np.asarray(found[~np.isnan(found)])


# -- results without tokens --------------------------------------------------------------------


def _compare_values(then: Any, now: Any) -> Verified:
    mine, theirs = map(_as_rows, (then, now))
    rows = max(len(mine), len(theirs))
    differing = [
        (i, names)
        for i, (one, other) in enumerate(zip(mine, theirs, strict=False))
        if (names := _other_values(one, other))
    ]
    upto = min(len(mine), len(theirs))
    first = "" if upto == rows else f"row {upto}: only one side has it"
    if differing:
        i, names = differing[0]
        first = f"row {i}: {', '.join(names)}"
    return Verified(
        calls=1,
        rows=rows,
        same=upto - len(differing),
        rows_then=len(mine),
        rows_now=len(theirs),
        first=first,
    )


def _as_rows(batch: Any) -> list[dict[str, Any]]:
    found = rows_of(batch)
    if found:
        return found
    return [{"value": one} for one in (batch if isinstance(batch, list | tuple) else [batch])]


def _other_values(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The names of values that both rows have and that differ, those of their making apart."""
    both = [name for name in a if name in b and name not in VOLATILE]
    return [str(name) for name in both if _hash(a[name]) != _hash(b[name])]


def _hash(value: Any) -> str:
    try:
        return str(fingerprint(value))
    except UnsupportedTypeError:
        return repr(value)
