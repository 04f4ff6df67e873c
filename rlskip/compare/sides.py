"""What a user calls a run: a job's records, a Hydra output directory, a run or a dump_dir."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import attrs

from rlskip.compare.records import StepRecords
from rlskip.compare.rollouts import Dumps
from rlskip.compare.rounding import Rounding
from rlskip.compare.steps import compare_step
from rlskip.compare.verdict import Comparison, StepResult
from rlskip.config.steps import Steps, compact
from rlskip.format.dump_errors import DumpError
from rlskip.jobs.records import SUMMARY, read_events
from rlskip.runs.on_disk import dumps_of, families
from rlskip.runs.opened import NoSuchPlaceError, Run
from rlskip.runs.rollouts import Decode
from rlskip.stages.parts import MARK
from rlskip.store.layout import STAGES


@attrs.frozen
class Side:
    """The records of one job, in ``{dump_dir}/stages/{job}`` or a copy of it."""

    name: str
    directory: Path

    def steps(self) -> list[int]:
        """The steps that were recorded, ascending."""
        return sorted(families(self.directory))

    def records(self, step: int) -> StepRecords:
        """What was recorded at a step; raises DumpError."""
        return StepRecords(dumps_of(self.directory, step))


def find_side(name: str, within: Path) -> Side:
    """The job that `name` means; raises NoSuchPlaceError where nothing was recorded there.

    It is the path of a job's records, of a Hydra output directory, of a run, of a directory of
    runs, or of a dump_dir, whose newest job it then is; or the name of a job in the dump_dir
    `within`.
    """
    path = Path(name).expanduser()
    if not path.exists() and (job := within / STAGES / name).is_dir():
        return Side(name, job)
    if not path.exists():
        raise NoSuchPlaceError("no such directory, nor a job with records", name)
    path = path.resolve()
    recorded = _of_output(path)
    if recorded is not None:
        return Side(name, recorded)
    if has_records(path):
        return Side(name, path)
    jobs = _jobs(path)
    if jobs:
        newest = jobs[-1]
        more = f" (job {newest.name}, the newest of {len(jobs)})" if len(jobs) > 1 else ""
        return Side(name + more, newest)
    raise NoSuchPlaceError(
        "no stages were recorded here", name, "record them: run the job again with +record=stages"
    )


def run_of(side: Side, decode: Decode | None = None) -> Run | None:
    """The run whose rollouts a job trained on; None where its dumps are not beside its records."""
    dump_dir = side.directory.parent.parent
    names = {event.run for event in read_events(dump_dir, side.directory.name) if event.run}
    runs = [Run(dump_dir / name, decode=decode) for name in sorted(names)]
    return next((run for run in runs if run.steps()), None)


def has_records(directory: Path) -> bool:
    """Whether a directory holds the steps of a job's records."""
    metas = (
        dump.meta for step in sorted(families(directory)) for dump in dumps_of(directory, step)
    )
    first = next((meta for meta in metas if meta is not None), None)  # others are damaged
    return first is not None and MARK in first.info


def compare_sides(
    a: Side | Dumps,
    b: Side | Dumps,
    rounding: Rounding,
    wanted: Steps,
    progress: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> Comparison:
    """Compare two jobs or dumps by step: what is in memory at a time does not grow with them.

    `progress` returns the steps that it is given, and shows how far it is. Raises NoSuchPlaceError
    where they have none of the `wanted` steps in common, DumpError where none can be read.
    """
    mine, theirs = ({step for step in side.steps() if step in wanted} for side in (a, b))
    if not mine & theirs:
        one, other = (compact(sorted(steps)) or "none" for steps in (mine, theirs))
        what = f"they have no common step: A has {one}, B has {other}"
        raise NoSuchPlaceError(what, f"{a.name}, {b.name}")
    steps, unreadable, error = list[StepResult](), dict[int, str](), None
    for step in progress(sorted(mine & theirs)):
        try:
            steps.append(compare_step(step, a.records(step), b.records(step), rounding))
        except (DumpError, NoSuchPlaceError) as caught:  # a live run may have removed it meanwhile
            unreadable[step], error = str(caught).partition("\n")[0], caught
    if error is not None and not steps:
        raise error
    alone = sorted(mine - theirs), sorted(theirs - mine)
    return Comparison(a.name, b.name, steps, *alone, rounding.rule, unreadable)


def _of_output(path: Path) -> Path | None:
    """The records of the job whose summary is in a Hydra output directory."""
    try:
        summary = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
        recorded = summary["stages"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(recorded, str):
        return None
    if not has_records(Path(recorded)):
        raise NoSuchPlaceError(
            "the records of this job are gone", str(path), f"they were in {recorded}"
        )
    return Path(recorded)


def _jobs(path: Path) -> list[Path]:
    """The jobs with records in a dump_dir, or those that used a run at or below `path`, the newest
    last."""
    # {dump_dir}/{experiment}_{project}/{shape}[/{role}]
    within = (path, *path.parents[:3])
    dump_dir = next((one for one in within if (one / STAGES).is_dir()), None)
    if dump_dir is None:
        return []
    # The name of a job begins with the time of its start.
    every = (job for job in (dump_dir / STAGES).iterdir() if job.is_dir() and has_records(job))
    place = path.relative_to(dump_dir).parts
    return sorted(job for job in every if not place or _used(dump_dir, job.name, place))


def _used(dump_dir: Path, job: str, place: tuple[str, ...]) -> bool:
    """Whether a job used a run whose directory below the dump_dir begins with `place`."""
    runs = {event.run for event in read_events(dump_dir, job) if event.run}
    return any(Path(run).parts[: len(place)] == place for run in runs)
