"""`rlskip diff A B`: which prompts, tokens, log-probs and rewards differ, from which token on."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import attrs
from rich.console import RenderableType

from rlskip.cli.dumps import Run, Target, compact
from rlskip.cli.rows import Columns, Row, columns_of, plain, rows_of, values
from rlskip.cli.screen import Answer, number, progress, short, table, text


@attrs.frozen
class Difference:
    """A row of A beside its counterpart in B (None: it has none there).

    ``token`` is the place in the response of the first token that differs, ``log_prob`` that of
    the first log-prob off by more than the tolerance; ``by`` is the largest such gap.
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


@attrs.define
class StepTally:
    """Of one step in both: how many rows are alike and how many differ in what."""

    step: int
    rows: int = 0
    same: int = 0
    prompts: int = 0
    tokens: int = 0
    log_probs: int = 0
    rewards: int = 0
    others: int = 0


def diff(a: Target, b: Target, *, tolerance: float, limit: int) -> Answer:
    """Two steps, or all the steps of two runs. Exit code 1 where anything differs."""
    pairs, only_a, only_b = _pairs(a, b)
    tallies, differences = [], []
    for step, other in progress(pairs, "comparing"):
        found, rows = compare(_load(a.run, step, a), _load(b.run, other, b), step, tolerance)
        differences += found
        tallies.append(_tally(step, rows, found))
    data = {
        "a": a.name,
        "b": b.name,
        "only_in_a": only_a,
        "only_in_b": only_b,
        "steps": [attrs.asdict(tally) for tally in tallies],
        "differences": [attrs.asdict(one) for one in differences],
    }
    differ = bool(differences or only_a or only_b)
    return Answer(data, _view(data, tallies, differences, limit), 1 if differ else 0)


def _pairs(a: Target, b: Target) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """Which step is compared with which, and the steps that only one side has."""
    if a.step is not None and b.step is not None:
        return [(a.step, b.step)], [], []
    mine = a.run.steps() if a.step is None else [a.step]
    theirs = b.run.steps() if b.step is None else [b.step]
    both = sorted(set(mine) & set(theirs))
    only_a, only_b = sorted(set(mine) - set(theirs)), sorted(set(theirs) - set(mine))
    return [(step, step) for step in both], only_a, only_b


def _load(run: Run, step: int, target: Target) -> list[Columns]:
    named = Target(run, step, target.inner)
    return [columns_of(dump.load()) for dump in named.dumps()]


# -- comparing ---------------------------------------------------------------------------------


def compare(
    a: Sequence[Columns], b: Sequence[Columns], step: int, tolerance: float
) -> tuple[list[Difference], int]:
    """What differs, and how many rows A has."""
    rows_a = [row for part in a for row in rows_of(part)]
    rows_b = [row for part in b for row in rows_of(part)]
    if not rows_a and not rows_b:
        return _compare_columns(a, b, step), sum(part.n for part in a)
    # By content, in whatever order: the first of A's rows of a prompt with the first of B's.
    waiting: dict[tuple[int, ...], deque[tuple[int, Row]]] = defaultdict(deque)
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


def _compare_rows(a: Row, b: Row, tolerance: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    token = _first(a.response, b.response)
    if token is not None:
        found["token"] = token
    # Past the first other token, log-probs are of other texts.
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
    """Rollouts without tokens: column by column, row by row."""
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
        # As text, in which a NaN is like a NaN.
        rows += [{n: repr(plain(c[i])) for n, c in columns.items()} for i in range(part.n)]
    return rows


# -- for people ----------------------------------------------------------------------------------


def _tally(step: int, rows: int, found: list[Difference]) -> StepTally:
    here = [one for one in found if one.a is not None]
    return StepTally(
        step,
        rows,
        rows - len(here),
        prompts=sum(one.a is None or one.b is None for one in found),
        tokens=sum(one.token is not None for one in found),
        log_probs=sum(one.log_prob is not None for one in found),
        rewards=sum(one.reward is not None for one in found),
        others=sum(one.mask or one.field is not None for one in found),
    )


def _view(
    data: dict[str, Any], tallies: list[StepTally], found: list[Difference], limit: int
) -> list[RenderableType]:
    view: list[RenderableType] = [text(f"A {data['a']}"), text(f"B {data['b']}"), text("")]
    shown = table(
        ">step", ">rows", ">same", ">prompts", ">tokens", ">log-probs", ">rewards", ">others"
    )
    for tally in tallies:
        shown.add_row(*(str(value) for value in attrs.astuple(tally)))
    view.append(shown)
    for side, steps in (("A", data["only_in_a"]), ("B", data["only_in_b"])):
        if steps:
            view.append(text(f"only in {side}: steps {compact(steps)}"))
    if found:
        view.append(text(""))
        rows = table(">step", ">row", ">in B", "uid", "what differs")
        for one in found[:limit]:
            rows.add_row(
                str(one.step),
                "" if one.a is None else str(one.a),
                "" if one.b is None else str(one.b),
                text(short(one.uid or "", 24)),
                text(_words(one)),
            )
        view.append(rows)
        if len(found) > limit:
            view.append(text(f"{len(found) - limit} more rows differ: --limit, or --json for all"))
    elif tallies and not data["only_in_a"] and not data["only_in_b"]:
        view.append(text("no difference"))
    return view


def _words(one: Difference) -> str:
    if one.b is None:
        return "this prompt is not in B"
    if one.a is None:
        return "this prompt is not in A"
    said = [] if one.token is None else [f"tokens from {one.token} on"]
    if one.log_prob is not None:
        gap = "" if one.by is None else f" by up to {number(one.by)}"
        said.append(f"log-probs from token {one.log_prob} on{gap}")
    if one.reward is not None:
        said.append(f"reward {number(one.reward[0]) or 'none'} / {number(one.reward[1]) or 'none'}")
    if one.mask:
        said.append("which tokens were sampled")
    if one.field is not None:
        said.append(one.field)
    return "; ".join(said)
