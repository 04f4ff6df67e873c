"""`rlskip compare`: where two trainings first differ."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from rlskip.cli.options import Dir, Json, MaxMb, Success, Tokenizer, decoder, dump_dir
from rlskip.cli.report import shown, write
from rlskip.cli.screen import Cell, progress, put, table, text
from rlskip.config.steps import Steps
from rlskip.runs.find import find_target
from rlskip.runs.opened import NoSuchPlaceError

if TYPE_CHECKING:
    from rlskip.compare.rollouts import Dumps
    from rlskip.compare.sides import Side
    from rlskip.compare.verdict import Comparison
    from rlskip.report.one_run import Shown
    from rlskip.runs.rollouts import Decode

RUN = "A job, Hydra's output directory, a run, a dump_dir; of dumps also a step as of show."


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help=RUN)],
    b: Annotated[str, typer.Argument(metavar="B", help="The other.")],
    directory: Dir = None,
    steps: Annotated[str, typer.Option(help="Steps to compare: 3, 1-10, all.")] = "all",
    rtol: Annotated[
        float | None, typer.Option(min=0.0, help="Relative tolerance; default: by dtype.")
    ] = None,
    atol: Annotated[float | None, typer.Option(min=0.0, help="Absolute tolerance.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Also write a page about both, as report does.")
    ] = None,
    max_mb: MaxMb = 5.0,
    success: Success = 0.5,
    tokenizer: Tokenizer = None,
    as_json: Json = False,
) -> int:
    """Find where two trainings first differ.

    Compares what +record=stages recorded; without that, the rollouts: two runs or two steps. Exit
    code 1 if anything differs.
    """
    from rlskip.compare.rollouts import side_decode
    from rlskip.compare.rounding import Rounding
    from rlskip.compare.sides import compare_sides
    from rlskip.compare.verdict import COLUMNS, table_of
    from rlskip.report.page import render

    within, decode = dump_dir(directory), decoder(tokenizer)
    wanted = Steps.parse(steps, "--steps")
    sides = _sides(a, b, within, decode)
    one, other = sides
    found = compare_sides(
        one, other, Rounding(rtol, atol), wanted, partial(progress, doing="comparing")
    )
    words = side_decode(sides, decode)
    if html is not None:
        said = {
            "said": found.verdict(words),
            "is_equal": found.is_equal,
            "columns": COLUMNS,
            "rows": table_of(found),
        }
        pair = [_shown(side, decode) for side in sides]
        page, _ = render(pair, success=success, max_bytes=int(max_mb * 1e6), verdict=said)
        write(page, html)
    return put(as_json, _data(found, words), _view(found, words), failed=not found.is_equal)


def _shown(side: Side | Dumps, decode: Decode | None) -> Shown:
    from rlskip.compare.rollouts import Dumps
    from rlskip.compare.sides import run_of
    from rlskip.report.one_run import Shown

    if isinstance(side, Dumps):
        return shown(side.name, side.run)
    return Shown(side.name, run_of(side, decode), side)


def _sides(
    a: str, b: str, within: Path, decode: Decode | None
) -> tuple[Side, Side] | tuple[Dumps, Dumps]:
    """The jobs that `a` and `b` mean; dumps where both have some and one has no records."""
    from rlskip.compare.rollouts import Dumps
    from rlskip.compare.sides import find_side

    try:
        return find_side(a, within), find_side(b, within)
    except NoSuchPlaceError:
        return Dumps.pair(find_target(a, within, decode), find_target(b, within, decode))


# -- for people ------------------------------------------------------------------------------


def _data(found: Comparison, decode: Decode | None) -> dict[str, Any]:
    return {
        **attrs.asdict(found),
        "equal": found.is_equal,
        "first": None if found.first is None else attrs.asdict(found.first),
        "verdict": found.verdict(decode),
    }


def _view(found: Comparison, decode: Decode | None) -> list[Cell]:
    from rlskip.compare.verdict import COLUMNS, table_of

    rows = [
        (*cells, text(result, "" if result.startswith(("equal", "within")) else "red"))
        for *cells, result in table_of(found)
    ]
    said = found.verdict(decode)
    view: list[Cell] = [said[0].upper() + said[1:], *found.only_one_has, ""]
    used = [i for i in range(len(COLUMNS)) if any(str(row[i]) for row in rows)]
    cells = [[row[i] for i in used] for row in rows]
    view += [f"A {found.a}", f"B {found.b}", "", table([COLUMNS[i] for i in used], cells)]
    return [*view, "", f"rounding: {found.rule}; --json has each stage"]
