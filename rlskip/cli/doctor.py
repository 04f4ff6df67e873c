"""`rlskip doctor`: the first command to run when nothing is skipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import attrs
import typer

from rlskip.cli.options import Dir, Json, dump_dir
from rlskip.cli.screen import Cell, grid, put, text
from rlskip.doctor import ERROR, NOTE, OK, WARNING, Finding

_MARKS = {OK: ("ok", "green"), NOTE: ("--", "dim"), WARNING: ("!", "yellow"), ERROR: ("X", "red")}


def doctor(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="After --: the command to explain; it is not run."),
    ] = None,
    directory: Dir = None,
    as_json: Json = False,
) -> int:
    """Find out why nothing is skipped.

    Reports what is installed and discovered, and what COMMAND would skip. Exit code 1 if there is
    an error.
    """
    from rlskip.doctor.environment import dump_dir_finding, environment

    sections: list[tuple[str, list[Finding]]] = [("this environment", environment())]
    if command:
        from rlskip.doctor.explain import explain

        sections.append((" ".join(command), explain(command)))
    else:
        sections[0][1].append(dump_dir_finding(dump_dir(directory)))
    view: list[Cell] = []
    for i, (title, findings) in enumerate(sections):
        shown = findings
        if command and i == 0:  # what passes is hidden
            shown = [finding for finding in findings if finding.level in (WARNING, ERROR)]
            title = title if shown else f"{title}: no problems"
        view += ["", text(title, "bold"), *([grid(_rows(shown))] if shown else [])]
    levels = [finding.level for _, findings in sections for finding in findings]
    data = [{"about": title, "findings": [*map(attrs.asdict, said)]} for title, said in sections]
    view += ["", f"errors: {levels.count(ERROR)}, warnings: {levels.count(WARNING)}"]
    return put(as_json, data, view[1:], failed=ERROR in levels)


def _rows(findings: Sequence[Finding]) -> list[tuple[Cell, ...]]:
    rows: list[tuple[Cell, ...]] = []
    for finding in findings:
        mark, style = _MARKS[finding.level]
        rows.append((text(mark, style), finding.topic, finding.what))
        if finding.remedy:
            rows.append(("", "", text(f"-> {finding.remedy}", style)))
    return rows
