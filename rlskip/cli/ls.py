"""`rlskip ls`: the runs in a dump_dir; the steps of a run."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import attrs
from rich.console import RenderableType

from rlskip._human import age, duration, size
from rlskip.cli.screen import Answer, table, text
from rlskip.config.steps import compact
from rlskip.jobs.records import StepTallies, tally_steps
from rlskip.runs.find import find_runs
from rlskip.runs.listing import RunLine, StepLine, arranged
from rlskip.runs.opened import Run


def ls(
    where: Path, steps: bool, *, sort: str = "name", limit: int | None = None, only: str = ""
) -> Answer:
    """The runs below `where`; with `steps`, or if it is the directory of one run, their steps.

    `only` is a part of the names of the runs to list, or a pattern with ``*``.
    """
    found = find_runs(where)
    runs = [run for run in found if fnmatchcase(run.name, f"*{only}*")]
    if steps or [run.directory for run in runs] == [where]:
        return _steps(runs, sort, limit)
    tallies = _tallies(runs)
    every = [RunLine.of(run, tallies[run.dump_dir].get(run.name, {})) for run in runs]
    lines = arranged(every, sort, limit)
    shown = table("run", "steps", ">size", ">age", ">hits", ">misses", ">saved", "")
    for line in lines:
        bad = [f"{line.unreadable} unreadable"] if line.unreadable else []
        bad += [f"{line.quarantined} quarantined"] if line.quarantined else []
        journals = [f"{line.journals} with a journal"] if line.journals else []
        shown.add_row(
            text(line.run),
            compact(line.steps),
            size(line.size),
            age(line.written) if line.written else "",
            str(line.hits),
            str(line.misses),
            duration(max(0.0, line.seconds_saved)),
            text(", ".join([*journals, *bad]), "red" if bad else ""),
        )
    view: list[RenderableType] = [shown, *_more(every, lines)]
    if not lines:
        none = f"none of {len(found)} runs matches {only!r}" if found else f"no dumps in {where}"
        view = [text(none)]
    return Answer([attrs.asdict(line) for line in lines], view)


def _tallies(runs: Sequence[Run]) -> dict[Path, dict[str, StepTallies]]:
    """The records of each dump_dir, read once."""
    return {dump_dir: tally_steps(dump_dir) for dump_dir in {run.dump_dir for run in runs}}


def _more(every: Sequence[object], lines: Sequence[object]) -> list[RenderableType]:
    left = len(every) - len(lines)
    return [text(f"{left} more: a larger --limit lists them")] if left else []


def _steps(runs: list[Run], sort: str, limit: int | None) -> Answer:
    data: list[dict[str, object]] = []
    view: list[RenderableType] = []
    all_tallies = _tallies(runs)
    for run in runs:
        tallies = all_tallies[run.dump_dir].get(run.name, {})
        every = [StepLine.of(dump, tallies) for dump in run.dumps(identities=False)]
        lines = arranged(every, sort, limit)
        heads = (">step", ">size", ">in memory", ">age", ">generated in", ">hits", "made by job")
        shown = table(*heads)
        for line in lines:
            shown.add_row(
                line.dump,
                size(line.size),
                "" if line.nbytes is None else size(line.nbytes),
                age(line.written),
                "" if line.seconds is None else duration(line.seconds),
                str(line.hits),
                text(line.problem, "red") if line.problem else text(line.job or ""),
            )
        quarantined = [str(path.relative_to(run.directory)) for path in run.quarantine()]
        journals = [path.name for path in run.journals()]
        view += [text(run.name, "bold"), shown, *_more(every, lines)]
        if journals:
            view.append(text(f"journals: {', '.join(journals)}"))
        if quarantined:
            view.append(text(f"quarantined: {', '.join(quarantined)}", "red"))
        data.append(
            {
                "run": run.name,
                "directory": str(run.directory),
                "dumps": [attrs.asdict(line) for line in lines],
                "quarantined": quarantined,
                "journals": journals,
            }
        )
    return Answer(data, view)
