"""`rlskip ls`: the runs in a dump_dir; the steps of a run."""

from __future__ import annotations

from pathlib import Path

import attrs
from rich.console import RenderableType

from rlskip._human import age, duration, size
from rlskip.cli.screen import Answer, table, text
from rlskip.config.steps import compact
from rlskip.jobs.records import tally_steps
from rlskip.runs.listing import RunLine, StepLine
from rlskip.runs.on_disk import Run, find_runs


def ls(where: Path, steps: bool) -> Answer:
    """The runs below `where`; with `steps`, or if it is the directory of one run, their steps."""
    runs = find_runs(where)
    if steps or [run.directory for run in runs] == [where]:
        return _steps(runs)
    lines = [RunLine.of(run, tally_steps(run.dump_dir).get(run.name, {})) for run in runs]
    shown = table("run", "steps", ">size", ">age", ">hits", ">misses", ">saved", "")
    for line in lines:
        bad = [f"{line.unreadable} unreadable"] if line.unreadable else []
        bad += [f"{line.quarantined} quarantined"] if line.quarantined else []
        shown.add_row(
            text(line.run),
            compact(line.steps),
            size(line.size),
            age(line.written) if line.written else "",
            str(line.hits),
            str(line.misses),
            duration(max(0.0, line.seconds_saved)),
            text(", ".join(bad), "red"),
        )
    view = [shown if lines else text(f"no dumps in {where}")]
    return Answer([attrs.asdict(line) for line in lines], view)


def _steps(runs: list[Run]) -> Answer:
    data: list[dict[str, object]] = []
    view: list[RenderableType] = []
    for run in runs:
        tallies = tally_steps(run.dump_dir).get(run.name, {})
        lines = [StepLine.of(dump, tallies) for dump in run.dumps(identities=False)]
        shown = table(
            ">step", ">size", ">in memory", ">age", ">generated in", ">hits", "made by job"
        )
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
        view += [text(run.name, "bold"), shown]
        if quarantined:
            view.append(text(f"quarantined: {', '.join(quarantined)}", "red"))
        data.append(
            {
                "run": run.name,
                "directory": str(run.directory),
                "dumps": [attrs.asdict(line) for line in lines],
                "quarantined": quarantined,
            }
        )
    return Answer(data, view)
