"""Two dumps compared: which prompts, tokens, log-probs and rewards differ."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import attrs

from rlskip.runs.trajectories import Columns, Trajectory, plain, rows_of, values


@attrs.frozen
class Difference:
    """A row of A and its counterpart in B (None: there is none).

    ``token`` is the index in the response of the first token that differs, ``log_prob`` that of
    the first log-prob that differs by more than the tolerance; ``by`` is the largest such gap.
    ``call`` is the place of its call or part in the step, where there are several.
    """

    step: int
    a: int | None
    b: int | None
    uid: str | None
    token: int | None = None
    log_prob: int | None = None
    by: float | None = None
    reward: tuple[float | None, float | None] | None = None
    mask: bool = False
    field: str | None = None
    call: int | None = None


@attrs.frozen
class StepTally:
    """A step that both sides have: how many rows are the same, and how many differ in what."""

    step: int
    rows: int = 0
    same: int = 0
    prompts: int = 0
    tokens: int = 0
    log_probs: int = 0
    rewards: int = 0
    others: int = 0

    @classmethod
    def of(cls, step: int, rows: int, found: Sequence[Difference]) -> StepTally:
        return cls(
            step,
            rows,
            rows - sum(one.a is not None for one in found),
            prompts=sum(one.a is None or one.b is None for one in found),
            tokens=sum(one.token is not None for one in found),
            log_probs=sum(one.log_prob is not None for one in found),
            rewards=sum(one.reward is not None for one in found),
            others=sum(one.mask or one.field is not None for one in found),
        )


def compare(
    a: Sequence[Columns], b: Sequence[Columns], step: int, tolerance: float
) -> tuple[list[Difference], int]:
    """The rows that differ, and the number of rows of A.

    Rows are matched by their prompts: the first row of a prompt in A with the first in B. `a` and
    `b` have the step's calls or parts in order.
    """
    found, rows = _compare(a, b, step, tolerance)
    if max(len(a), len(b)) > 1:
        found = [
            attrs.evolve(one, call=_call(b, one.b or 0) if one.a is None else _call(a, one.a))
            for one in found
        ]
    return found, rows


def _call(parts: Sequence[Columns], place: int) -> int:
    """The call or part that has the row at `place` of the step."""
    for i, part in enumerate(parts):
        if place < part.n:
            return i
        place -= part.n
    return len(parts) - 1


def _compare(
    a: Sequence[Columns], b: Sequence[Columns], step: int, tolerance: float
) -> tuple[list[Difference], int]:
    rows_a = [row for part in a for row in rows_of(part)]
    rows_b = [row for part in b for row in rows_of(part)]
    if not rows_a and not rows_b:
        return _compare_columns(a, b, step), sum(part.n for part in a)
    waiting: dict[tuple[int, ...], deque[tuple[int, Trajectory]]] = defaultdict(deque)
    for place, row in enumerate(rows_b):
        waiting[tuple(row.prompt)].append((place, row))
    found = []
    for place, row in enumerate(rows_a):
        queue = waiting[tuple(row.prompt)]
        if not queue:
            found.append(Difference(step, place, None, row.uid))
            continue
        other_place, other = queue.popleft()
        difference = _compare_rows(row, other, tolerance)
        if difference:
            found.append(Difference(step, place, other_place, row.uid, **difference))
    left = sorted((place, row) for queue in waiting.values() for place, row in queue)
    found += [Difference(step, None, place, row.uid) for place, row in left]
    return found, len(rows_a)


def _compare_rows(a: Trajectory, b: Trajectory, tolerance: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    token = _first(a.response, b.response)
    if token is not None:
        found["token"] = token
    # After the first token that differs, the log-probs belong to different texts.
    upto = len(a.response) if token is None else token
    gaps = [
        abs(x - y) if x == x and y == y else float(x != x) != float(y != y)
        for x, y in zip((a.log_probs or [])[:upto], (b.log_probs or [])[:upto], strict=False)
    ]
    beyond = [i for i, gap in enumerate(gaps) if gap > tolerance]
    if beyond:
        found |= {"log_prob": beyond[0], "by": float(max(gaps))}
    if (a.log_probs is None) != (b.log_probs is None):
        found["log_prob"] = 0
    if _other_reward(a.reward, b.reward, tolerance):
        found["reward"] = (a.reward, b.reward)
    if token is None and (a.mask or []) != (b.mask or []):
        found["mask"] = True
    return found


def _first(a: Sequence[int], b: Sequence[int]) -> int | None:
    if a == b:
        return None
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _other_reward(a: float | None, b: float | None, tolerance: float) -> bool:
    if a is None or b is None:
        return a is not b
    return abs(a - b) > tolerance or (a != a) != (b != b)


def _compare_columns(a: Sequence[Columns], b: Sequence[Columns], step: int) -> list[Difference]:
    """Rollouts without tokens, compared row by row."""
    left, right = _cells(a), _cells(b)
    found = []
    for i in range(max(len(left), len(right))):
        if i >= len(left) or i >= len(right):
            found.append(
                Difference(step, i if i < len(left) else None, i if i < len(right) else None, None)
            )
            continue
        names = [n for n in {**left[i], **right[i]} if left[i].get(n) != right[i].get(n)]
        if names:
            found.append(Difference(step, i, i, None, field=", ".join(names)))
    return found


def _cells(parts: Sequence[Columns]) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = []
    for part in parts:
        columns = {name: values(column) for name, column in part.columns.items()}
        # As text: a NaN equals a NaN.
        rows += [{n: repr(plain(c[i])) for n, c in columns.items()} for i in range(part.n)]
    return rows
