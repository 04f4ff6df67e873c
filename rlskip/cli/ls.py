"""`rlskip ls`: the runs in a dump_dir; a run's steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
from rich.console import RenderableType

from rlskip.cli.dumps import Dump, Run, compact, find_runs
from rlskip.cli.records import Records, read_records
from rlskip.cli.screen import Answer, age, duration, size, table, text


@attrs.frozen
class RunLine:
    """A run: `size` in bytes on disk, `written` the last time of it (seconds since 1970)."""

    run: str
    directory: str
    steps: list[int]
    dumps: int
    unreadable: int
    set_aside: int
    size: int
    written: float | None
    hits: int
    misses: int
    seconds_saved: float

    @classmethod
    def of(cls, run: Run, records: Records) -> RunLine:
        dumps = run.dumps()
        told = records.of_run(run.name)
        return cls(
            run=run.name,
            directory=str(run.directory),
            steps=sorted({dump.step for dump in dumps}),
            dumps=len(dumps),
            unreadable=sum(dump.meta is None for dump in dumps),
            set_aside=len(run.set_aside()),
            size=sum(dump.size for dump in dumps),
            written=max((dump.written for dump in dumps), default=None),
            **attrs.asdict(told),
        )


@attrs.frozen
class StepLine:
    """A dump; `nbytes` in memory, `seconds` that generating it took."""

    dump: str
    step: int
    inner: int | None
    size: int
    nbytes: int | None
    written: float
    seconds: float | None
    job: str | None
    hits: int
    problem: str | None

    @classmethod
    def of(cls, dump: Dump, run: Run, records: Records) -> StepLine:
        meta = dump.meta
        return cls(
            dump=dump.name,
            step=dump.step,
            inner=dump.place.inner,
            size=dump.size,
            nbytes=meta.nbytes if meta else None,
            written=dump.written,
            seconds=(meta.info.get("seconds") or None) if meta else None,
            job=meta.info.get("job") if meta else None,
            hits=records.of_step(run.name, dump.step).hits,
            problem=dump.problem,
        )


def ls(where: Path, steps: bool) -> Answer:
    """The runs below `where`; with `steps`, or where it is one run's directory, their steps."""
    runs = find_runs(where)
    if steps or [run.directory for run in runs] == [where]:
        return _steps(runs)
    lines = [RunLine.of(run, read_records(run.dump_dir)) for run in runs]
    shown = table("run", "steps", ">size", ">age", ">hits", ">misses", ">saved", "")
    for line in lines:
        bad = [f"{line.unreadable} unreadable"] if line.unreadable else []
        bad += [f"{line.set_aside} set aside"] if line.set_aside else []
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
    data: list[Any] = []
    view: list[RenderableType] = []
    for run in runs:
        records = read_records(run.dump_dir)
        lines = [StepLine.of(dump, run, records) for dump in run.dumps()]
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
        aside = [path.name for path in run.set_aside()]
        view += [text(run.name, "bold"), shown]
        view += [text(f"set aside: {', '.join(aside)}", "red")] if aside else []
        data.append(
            {
                "run": run.name,
                "directory": str(run.directory),
                "dumps": [attrs.asdict(line) for line in lines],
                "set_aside": aside,
            }
        )
    return Answer(data, view)
