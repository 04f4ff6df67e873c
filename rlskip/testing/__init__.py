"""What tests of your own can use: a training against a golden one, stage by stage."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from rich.console import Console

from rlskip.cli.screen import table
from rlskip.compare.rounding import Rounding
from rlskip.compare.sides import compare_sides, find_side
from rlskip.compare.verdict import COLUMNS, table_of
from rlskip.config.steps import Steps

__all__ = ["assert_same_training"]

_LINES, _WIDTH = 40, 200


def assert_same_training(
    golden: str | Path,
    run: str | Path,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    steps: str = "all",
) -> None:
    """Assert that a run computed what a golden run did, at each stage that either recorded.

    `golden`, which is A, and `run` are what ``rlskip compare`` takes: the records of a job, or a
    Hydra output directory, for example; `steps` those to compare, such as ``1-3``. Equal is
    ``|a - b| <= atol + rtol * max(|a|, |b|)``; without both, what rounding explains.

    Raises AssertionError, whose message is the verdict, which stage differs first, and where, and
    the table of stages; and RlskipError where there is nothing to compare.
    """
    a, b = (find_side(str(one), Path()) for one in (golden, run))
    found = compare_sides(a, b, Rounding(rtol, atol), Steps.parse(steps, "steps"))
    if found.is_equal:
        return
    console = Console(file=StringIO(), width=_WIDTH)
    with console.capture() as lines:
        console.print(table(COLUMNS, table_of(found)[:_LINES]))
    said = [found.verdict(), "", lines.get(), *found.only_one_has, found.rule]
    raise AssertionError("\n".join(said))
