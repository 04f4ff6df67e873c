"""The runs in a dump_dir and the dumps of a run, one line each."""

from __future__ import annotations

from typing import TypeVar

import attrs

from rlskip.jobs.records import StepTallies, Tally
from rlskip.runs.on_disk import Dump
from rlskip.runs.opened import Run

Line = TypeVar("Line", "RunLine", "StepLine")


@attrs.frozen
class RunLine:
    """A run: `size` in bytes on disk, `written` last (seconds since the epoch)."""

    run: str
    directory: str
    steps: list[int]
    dumps: int
    unreadable: int
    quarantined: int
    journals: int
    size: int
    written: float | None
    hits: int
    misses: int
    seconds_saved: float

    @classmethod
    def of(cls, run: Run, tallies: StepTallies) -> RunLine:
        """The line of `run`; `tallies` has its hits and misses."""
        dumps = run.dumps(identities=False)
        total = sum(tallies.values(), Tally())
        return cls(
            run=run.name,
            directory=str(run.directory),
            steps=sorted({dump.step for dump in dumps}),
            dumps=len(dumps),
            unreadable=sum(dump.meta is None for dump in dumps),
            quarantined=len(run.quarantine()),
            journals=len(run.journals()),
            size=sum(dump.size for dump in dumps),
            written=max((dump.written for dump in dumps), default=None),
            hits=total.hits,
            misses=total.misses,
            seconds_saved=total.seconds_saved,
        )


def arranged(lines: list[Line], order: str, limit: int | None) -> list[Line]:
    """At most `limit` of the lines: as they come (``name``), or the most of `order` first."""
    if order != "name":
        key = {"size": "size", "age": "written", "hits": "hits"}[order]
        lines = sorted(lines, key=lambda line: getattr(line, key) or 0, reverse=True)
    return lines[:limit]


@attrs.frozen
class StepLine:
    """A dump: `nbytes` in memory, `seconds` that generating it took.

    `hits` counts those of its call, and those that replayed the step as a whole.
    """

    dump: str
    step: int
    part: int | None
    size: int
    nbytes: int | None
    written: float
    seconds: float | None
    job: str | None
    hits: int
    problem: str | None

    @classmethod
    def of(cls, dump: Dump, tallies: StepTallies) -> StepLine:
        """The line of `dump`; `tallies` has the hits of its run."""
        meta = dump.meta
        own = (tallies.get((dump.step, part), Tally()) for part in (dump.call, None))
        return cls(
            dump=dump.name,
            step=dump.step,
            part=dump.call if dump.is_one_of_several else dump.place.part,
            size=dump.size,
            nbytes=meta.nbytes if meta else None,
            written=dump.written,
            seconds=dump.seconds,
            job=meta.info.get("job") if meta else None,
            hits=sum(tally.hits for tally in own),
            problem=dump.problem,
        )
