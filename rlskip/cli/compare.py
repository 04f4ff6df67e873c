"""`rlskip compare`: where two trainings first differ."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import attrs
import typer

from rlskip.cli.options import Dir, Json, MaxMb, Success, Tokenizer, decoder, dump_dir
from rlskip.cli.screen import Cell, progress, put, table, text, writing
from rlskip.config.steps import Steps

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
    from rlskip.compare.rounding import Rounding
    from rlskip.compare.sides import Dumps, characters, compare_sides, find_sides
    from rlskip.compare.verdict import COLUMNS, table_of
    from rlskip.report.page import render

    wanted, decode = Steps.parse(steps, "--steps"), decoder(tokenizer)
    sides = find_sides(a, b, dump_dir(directory), decode)
    comparing = partial(progress, doing="comparing")
    found = compare_sides(sides[0], sides[1], Rounding(rtol, atol), wanted, comparing)
    are_texts = any(isinstance(side, Dumps) and side.has_texts for side in sides)
    said, rows = found.verdict(characters if are_texts else decode), table_of(found)
    if html is not None:
        verdict = {"said": said, "is_equal": found.is_equal, "columns": COLUMNS, "rows": rows}
        page, _ = render(sides, success=success, max_bytes=int(max_mb * 1e6), verdict=verdict)
        with writing(html) as temporary:
            temporary.write_bytes(page)
    first = None if found.first is None else attrs.asdict(found.first)
    data = {**attrs.asdict(found), "equal": found.is_equal, "first": first, "verdict": said}
    used = [i for i in range(len(COLUMNS)) if any(row[i] for row in rows)]
    cells = [[*(row[i] for i in used[:-1]), text(row[-1], _style(row[-1]))] for row in rows]
    view: list[Cell] = [said[0].upper() + said[1:], *found.only_one_has, ""]
    view += [f"A {found.a}", f"B {found.b}", "", table([COLUMNS[i] for i in used], cells)]
    view += ["", f"rounding: {found.rule}; --json has each stage"]
    return put(as_json, data, view, failed=not found.is_equal)


def _style(result: str) -> str:
    return "" if result.startswith(("equal", "within")) else "red"
