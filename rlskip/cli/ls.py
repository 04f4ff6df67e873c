"""`rlskip ls`: the runs in a dump_dir; the steps of a run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from rlskip._human import counted
from rlskip.cli.options import Dir, Json, Where, dump_dir
from rlskip.cli.screen import Cell, listing, put, text
from rlskip.jobs.records import StepTallies, Tally, tally_steps
from rlskip.runs.find import find_runs
from rlskip.runs.on_disk import Dump, dumps_at, spread
from rlskip.runs.opened import Run

_SAMPLED = 2000  # dumps of a run that are read to list it

Line = dict[str, Any]
"""A run or a dump: bytes, and seconds since the epoch."""


def ls(
    where: Where = None,
    directory: Dir = None,
    steps: Annotated[bool, typer.Option("--steps", help="List the steps of every run.")] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="How many runs, or dumps of each run, to list.")
    ] = None,
    as_json: Json = False,
) -> int:
    """List the runs, or the steps of a run."""
    place = dump_dir(where, directory)
    runs = find_runs(place)
    # The records of each dump_dir are read once.
    recorded = {dump_dir: tally_steps(dump_dir) for dump_dir in {run.dump_dir for run in runs}}
    tallied = [(run, recorded[run.dump_dir].get(run.name, {})) for run in runs]
    if not runs:
        return put(as_json, [], [f"no dumps in {place}"])
    if steps or [run.directory for run in runs] == [place.resolve()]:
        listed = [_steps(run, tallies, limit) for run, tallies in tallied]
        parts = [part for _, view in listed for part in view]
        return put(as_json, [data for data, _ in listed], parts)
    lines = [_of_run(run, tallies) for run, tallies in tallied[:limit]]
    columns = {
        "run": "run", "steps": "steps", ">size": "size", ">age": "written", ">hits": "hits",
        ">misses": "misses", ">saved": "seconds_saved", "": "note",
    }  # fmt: skip
    return put(as_json, lines, [listing(lines, columns), *_more(len(tallied), lines)])


def _of_run(run: Run, tallies: StepTallies) -> Line:
    """A run; of more than `_SAMPLED` dumps the size is estimated, from some that lie evenly."""
    places = run.places()
    steps, every = list(places), sum(map(len, places.values()))
    some = spread(steps, max(2, _SAMPLED * len(steps) // max(1, every)))
    dumps = [dump for step in some for dump in dumps_at(places[step])]
    is_sampled = len(some) < len(steps)
    share = every / max(1, len(dumps)) if is_sampled else 1
    total = sum(tallies.values(), Tally())
    line = {
        "run": run.name,
        "directory": str(run.directory),
        "steps": steps if is_sampled else sorted({dump.step for dump in dumps}),
        "dumps": every if is_sampled else len(dumps),
        "read": len(dumps),
        "unreadable": sum(dump.meta is None for dump in dumps),
        "quarantined": len(run.quarantine()),
        "journals": len(run.journals()),
        "jobs": run.jobs(),
        "size": round(share * sum(dump.size for dump in dumps)),
        "written": max((dump.written for dump in dumps), default=None),
        "hits": total.hits,
        "misses": total.misses,
        "seconds_saved": total.seconds_saved,
    }
    return {**line, "note": _note(line)}


def _note(line: Line) -> str:
    found = [f"by {line['read']} of its dumps"] if line["read"] < line["dumps"] else []
    found += [f"{line['journals']} with a journal"] if line["journals"] else []
    found += [f"{counted(len(line['jobs']), 'job')} at work"] if line["jobs"] else []
    found += [f"{line[what]} {what}" for what in ("unreadable", "quarantined") if line[what]]
    return ", ".join(found)


def _more(every: int, lines: Sequence[Line]) -> list[Cell]:
    left = every - len(lines)
    return [f"{left} more: a larger --limit lists them"] if left > 0 else []


def _steps(run: Run, tallies: StepTallies, limit: int | None) -> tuple[Line, list[Cell]]:
    """The dumps of a run, and their table."""
    places = run.places()
    every = (_of_dump(dump, tallies) for some in places.values() for dump in dumps_at(some))
    lines = list(itertools.islice(every, limit))  # what comes after them is not read
    total = len(lines) if limit is None else sum(map(len, places.values()))
    columns = {
        ">step": "dump", ">size": "size", ">in memory": "nbytes", ">age": "written",
        ">generated in": "seconds", ">hits": "hits", "made by job": "job", "": "problem",
    }  # fmt: skip
    quarantined = [str(path.relative_to(run.directory)) for path in run.quarantine()]
    journals = [path.name for path in run.journals()]
    view = [text(run.name, "bold"), listing(lines, columns), *_more(total, lines)]
    jobs = run.jobs()
    view += [f"{who}: {', '.join(sorted(does))}" for who, does in sorted(jobs.items())]
    view += [f"journals: {', '.join(journals)}"] if journals else []
    view += [text(f"quarantined: {', '.join(quarantined)}", "red")] if quarantined else []
    data = {"run": run.name, "directory": str(run.directory), "dumps": lines, "jobs": jobs}
    return {**data, "quarantined": quarantined, "journals": journals}, view


def _of_dump(dump: Dump, tallies: StepTallies) -> Line:
    """`hits` counts those of its call, and those that replayed the step as a whole."""
    meta = dump.meta
    own = (tallies.get((dump.step, call), Tally()) for call in (dump.place.call, None))
    names = ("step", "call", "size", "written", "seconds", "problem")
    return {
        "dump": dump.name,
        **{name: getattr(dump, name) for name in names},
        "nbytes": meta.nbytes if meta else None,
        "job": meta.info.get("job") if meta else None,
        "hits": sum(tally.hits for tally in own),
    }
