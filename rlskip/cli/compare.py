"""`rlskip compare A B`: at which stage two trainings first differ."""

from __future__ import annotations

from pathlib import Path

import attrs
from rich.console import RenderableType

from rlskip.cli.report import Output, shown, write_page
from rlskip.cli.rollouts import compare_rollouts, verdict_of
from rlskip.cli.screen import Answer, progress, table, text
from rlskip.compare.rounding import Rounding
from rlskip.compare.sides import Side, compare_jobs, find_side, run_of
from rlskip.compare.verdict import COLUMNS, Comparison, Decode, only_one_has, table_of
from rlskip.config.steps import Steps
from rlskip.report.page import Shown, Verdict
from rlskip.runs.figures import Counter
from rlskip.runs.find import Target, find_target
from rlskip.runs.opened import NoSuchPlaceError, Run, Step


def compare(
    a: str,
    b: str,
    within: Path,
    *,
    steps: str,
    rounding: Rounding,
    limit: int,
    decode: Decode | None,
    out: Output | None = None,
) -> Answer:
    """Compare what two jobs recorded, or their rollouts. Exit code 1 if anything differs.

    Parameters
    ----------
    out
        Where to write the page about both; None for no page.

    Raises
    ------
    RlskipError
        There is nothing to compare, or a record cannot be read.
    """
    wanted = Steps.parse(steps, "--steps")
    sides = _sides(a, b, within)
    if sides is None:
        one, other = find_target(a, within, decode), find_target(b, within, decode)
        answer = compare_rollouts(one, other, tolerance=rounding.atol or 0.0, limit=limit)
        if out is not None:
            targets = zip((answer.data["a"], answer.data["b"]), (one, other), strict=True)
            pair = [shown(name, _run_of(target)) for name, target in targets]
            write_page(pair, out, decode, counter=Counter(), verdict=verdict_of(answer.data))
        return answer
    found = compare_jobs(*sides, rounding, wanted, lambda steps: progress(steps, "comparing"))
    first = found.first
    data = {
        **attrs.asdict(found),
        "equal": found.is_equal,
        "first": None if first is None else attrs.asdict(first),
        "verdict": found.verdict(decode),
    }
    if out is not None:
        named = zip((found.a, found.b), sides, strict=True)
        pair = [Shown(name, run_of(side, decode), side) for name, side in named]
        said = Verdict(found.verdict(decode), found.is_equal, COLUMNS, table_of(found, limit))
        write_page(pair, out, decode, counter=Counter(), verdict=said)
    return Answer(data, _view(found, limit, decode), 0 if found.is_equal else 1)


def _run_of(target: Target) -> Run:
    """The run of a target, with the step alone that it names."""
    if isinstance(target, Run):
        return target
    step = target if isinstance(target, Step) else target.step
    return step.run[step.number : step.number + 1]


def _sides(a: str, b: str, within: Path) -> tuple[Side, Side] | None:
    """The jobs that `a` and `b` mean; None where both have dumps and one has no records."""
    try:
        return find_side(a, within), find_side(b, within)
    except NoSuchPlaceError:
        try:
            find_target(a, within)
            find_target(b, within)
        except NoSuchPlaceError:
            pass
        else:
            return None
        raise


def _view(found: Comparison, limit: int, decode: Decode | None) -> list[RenderableType]:
    lines_of = table(*COLUMNS)
    for *cells, result in table_of(found, limit):
        lines_of.add_row(
            *map(text, cells), text(result, "" if result.startswith("equal") else "red")
        )
    lines: list[RenderableType] = [text(f"A {found.a}"), text(f"B {found.b}"), text(""), lines_of]
    if len(found.stages) > limit:
        lines.append(text(f"{len(found.stages) - limit} more lines: --limit, or --json for all"))
    said = found.verdict(decode)
    ends = [*only_one_has(found), "", said[0].upper() + said[1:]]
    return lines + [text(line) for line in ends]
