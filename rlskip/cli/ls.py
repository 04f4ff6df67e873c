"""`rlskip ls`: the runs in a dump_dir; the steps of a run."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from fnmatch import fnmatchcase
from typing import Annotated, Any

import typer

from rlskip._human import age, duration, size
from rlskip.cli.options import Dir, Json, Where, dump_dir
from rlskip.cli.screen import Cell, put, table, text
from rlskip.config.steps import compact
from rlskip.jobs.records import StepTallies, Tally, tally_steps
from rlskip.runs.find import find_runs
from rlskip.runs.on_disk import Dump
from rlskip.runs.opened import Run

Line = dict[str, Any]
"""A run or a dump: bytes, and seconds since the epoch."""


class Order(str, Enum):
    """Of what is listed."""

    name = "name"
    size = "size"
    age = "age"
    hits = "hits"


def ls(
    where: Where = None,
    directory: Dir = None,
    steps: Annotated[bool, typer.Option("--steps", help="List the steps of every run.")] = False,
    sort: Annotated[
        Order, typer.Option(help="By name, or largest, newest or most hits first.")
    ] = Order.name,
    limit: Annotated[
        int | None, typer.Option(min=1, help="How many runs, or dumps of each run, to list.")
    ] = None,
    only: Annotated[
        str, typer.Option("--filter", help="Only runs with this in their names: lr2, lr*seed1.")
    ] = "",
    as_json: Json = False,
) -> int:
    """List the runs, or the steps of a run."""
    place = dump_dir(where or directory)
    found = find_runs(place)
    runs = [run for run in found if fnmatchcase(run.name, f"*{only}*")]
    # The records of each dump_dir are read once.
    recorded = {dump_dir: tally_steps(dump_dir) for dump_dir in {run.dump_dir for run in runs}}
    tallied = [(run, recorded[run.dump_dir].get(run.name, {})) for run in runs]
    if steps or [run.directory for run in runs] == [place.resolve()]:
        listed = [_steps(run, tallies, sort, limit) for run, tallies in tallied]
        parts = [part for _, view in listed for part in view]
        return put(as_json, [data for data, _ in listed], parts)
    every = [_of_run(run, tallies) for run, tallies in tallied]
    lines = _arranged(every, sort, limit)
    if not lines:
        none = f"none of {len(found)} runs matches {only!r}" if found else f"no dumps in {place}"
        return put(as_json, [], [none])
    rows = [
        (
            line["run"],
            compact(line["steps"]),
            size(line["size"]),
            age(line["written"]) if line["written"] else "",
            line["hits"],
            line["misses"],
            duration(max(0.0, line["seconds_saved"])),
            _note(line),
        )
        for line in lines
    ]
    shown = table(("run", "steps", ">size", ">age", ">hits", ">misses", ">saved", ""), rows)
    return put(as_json, lines, [shown, *_more(every, lines)])


def _of_run(run: Run, tallies: StepTallies) -> Line:
    dumps = run.dumps()
    total = sum(tallies.values(), Tally())
    return {
        "run": run.name,
        "directory": str(run.directory),
        "steps": sorted({dump.step for dump in dumps}),
        "dumps": len(dumps),
        "unreadable": sum(dump.meta is None for dump in dumps),
        "quarantined": len(run.quarantine()),
        "journals": len(run.journals()),
        "jobs": run.jobs(),
        "size": sum(dump.size for dump in dumps),
        "written": max((dump.written for dump in dumps), default=None),
        "hits": total.hits,
        "misses": total.misses,
        "seconds_saved": total.seconds_saved,
    }


def _note(line: Line) -> Cell:
    found = [f"{line['journals']} with a journal"] if line["journals"] else []
    if jobs := len(line["jobs"]):
        found.append(f"{jobs} job{'s' * (jobs > 1)} at work")
    bad = [f"{line[what]} {what}" for what in ("unreadable", "quarantined") if line[what]]
    return text(", ".join([*found, *bad]), "red" if bad else "")


def _arranged(lines: list[Line], sort: Order, limit: int | None) -> list[Line]:
    """At most `limit` of the lines: as they come (``name``), or the most of `sort` first."""
    if sort != Order.name:
        key = "written" if sort == Order.age else sort.value
        lines = sorted(lines, key=lambda line: line[key] or 0, reverse=True)
    return lines[:limit]


def _more(every: Sequence[Line], lines: Sequence[Line]) -> list[Cell]:
    left = len(every) - len(lines)
    return [f"{left} more: a larger --limit lists them"] if left else []


def _steps(
    run: Run, tallies: StepTallies, sort: Order, limit: int | None
) -> tuple[Line, list[Cell]]:
    """The dumps of a run, and their table."""
    every = [_of_dump(dump, tallies) for dump in run.dumps()]
    lines = _arranged(every, sort, limit)
    rows = [
        (
            line["dump"],
            size(line["size"]),
            "" if line["nbytes"] is None else size(line["nbytes"]),
            age(line["written"]),
            "" if line["seconds"] is None else duration(line["seconds"]),
            line["hits"],
            text(line["problem"], "red") if line["problem"] else line["job"] or "",
        )
        for line in lines
    ]
    heads = (">step", ">size", ">in memory", ">age", ">generated in", ">hits", "made by job")
    quarantined = [str(path.relative_to(run.directory)) for path in run.quarantine()]
    journals = [path.name for path in run.journals()]
    view = [text(run.name, "bold"), table(heads, rows), *_more(every, lines)]
    jobs = run.jobs()
    view += [f"{who}: {', '.join(sorted(does))}" for who, does in sorted(jobs.items())]
    if journals:
        view.append(f"journals: {', '.join(journals)}")
    if quarantined:
        view.append(text(f"quarantined: {', '.join(quarantined)}", "red"))
    data = {
        "run": run.name,
        "directory": str(run.directory),
        "dumps": lines,
        "quarantined": quarantined,
        "journals": journals,
        "jobs": jobs,
    }
    return data, view


def _of_dump(dump: Dump, tallies: StepTallies) -> Line:
    """`hits` counts those of its call, and those that replayed the step as a whole."""
    meta = dump.meta
    own = (tallies.get((dump.step, call), Tally()) for call in (dump.place.call, None))
    return {
        "dump": dump.name,
        "step": dump.step,
        "call": dump.call if dump.is_one_of_several else None,
        "size": dump.size,
        "nbytes": meta.nbytes if meta else None,
        "written": dump.written,
        "seconds": dump.seconds,
        "job": meta.info.get("job") if meta else None,
        "hits": sum(tally.hits for tally in own),
        "problem": dump.problem,
    }
