"""The figures of a run's report: times, lengths, rewards, a sample of rows, timelines."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from rlskip._files import open_folder
from rlskip.jobs.records import StepTallies, Tally, tally_steps
from rlskip.report.charts import Box
from rlskip.report.sample import Sampled, Sampler
from rlskip.runs.counts import Counts
from rlskip.runs.decoding import Decoder
from rlskip.runs.on_disk import Dump, Run
from rlskip.runs.trajectories import rollout_columns
from rlskip.store import DumpError

MAX_VALUES = 1_000_000  # sessions whose length and reward are counted, the latest steps first
_TIMELINES = 6
_TRACE = re.compile(r".+-\d{1,18}\.json")
_MAX_TRACE = 256 << 20  # bytes
_NOT_A_TRACE = (
    OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip
_BOXES = 5_000


@attrs.frozen
class StepFigures:
    """A dump: its sessions, its hits and misses, and why it cannot be read."""

    dump: Dump
    counts: Counts | None  # of its sessions; None if they are not counted
    tally: Tally
    problem: str | None


@attrs.frozen
class Timeline:
    """The dispatch of one step: a box for each attempt, up to a limit; `attempts` counts all."""

    name: str
    boxes: list[Box]
    lanes: list[str]
    attempts: int


@attrs.frozen
class Report:
    """Everything that the page shows; `timelines` are the last of `all_timelines`."""

    run: Run
    steps: list[StepFigures]
    tally: Tally
    lengths: dict[int, list[int]]  # of the sessions of each step, the latest first
    rewards: dict[int, list[float]]
    counted: int  # sessions
    groups: int
    sample: dict[str, list[Sampled]]
    decoded: bool
    timelines: list[Timeline]
    all_timelines: int

    @property
    def steps_dumped(self) -> int:
        return len({one.dump.step for one in self.steps})


def look(
    run: Run,
    rows: int,
    decoder: Decoder | None,
    timeline_dir: Path | None,
    progress: Callable[[Sequence[Dump]], Iterable[Dump]] = iter,
) -> Report:
    """Read the dumps and records of `run`. A dump that cannot be read is listed with its problem.

    `rows` sessions of the run are sampled; `progress` wraps the dumps that are read.
    """
    tallies = tally_steps(run.dump_dir).get(run.name, {})
    dumps = run.dumps()
    figures: list[StepFigures] = []
    lengths: dict[int, list[int]] = {}
    rewards: dict[int, list[float]] = {}
    sampler = Sampler(rows, decoder)
    counted = groups = 0
    # The latest steps first: a limit must not leave them out.
    for dump in progress(dumps[::-1]):
        counts, problem = None, dump.problem
        if problem is None and counted < MAX_VALUES:
            try:
                columns = rollout_columns(dump.load(into="numpy"))
            except DumpError as error:
                problem = error.what
            else:
                counts = Counts.of(columns)
                sampler.offer(dump.name, columns, counts)
                counted += len(counts.sessions)
                groups += counts.groups
                lengths.setdefault(dump.step, []).extend(counts.lengths)
                given = [reward for reward in counts.rewards if reward is not None]
                rewards.setdefault(dump.step, []).extend(given)
        figures.append(StepFigures(dump, counts, _tally(dump, tallies), problem))
    return Report(
        run,
        figures[::-1],
        sum(tallies.values(), Tally()),
        lengths,
        rewards,
        counted,
        groups,
        sampler.result(),
        decoder is not None,
        *_timelines(timeline_dir or run.directory),
    )


def _tally(dump: Dump, tallies: StepTallies) -> Tally:
    """Each event in one row: a call's at the first rank's shard, a step's at the first call."""
    parts = [] if dump.place.rank else [dump.call] if dump.call else [0, None]
    return sum((tallies.get((dump.step, part), Tally()) for part in parts), Tally())


# -- the dispatch timeline ------------------------------------------------------------------


def _timelines(directory: Path) -> tuple[list[Timeline], int]:
    """The last of the traces ``{partition}-{step}.json`` in `directory`, and the number of all."""
    found: list[Timeline] = []
    with open_folder(directory) as folder:
        names = [name for name in folder.names() if _TRACE.fullmatch(name)]
        names.sort(key=lambda name: (int(name[:-5].rpartition("-")[2]), name))
        number = len(names)
        while names and len(found) < _TIMELINES:
            name = names.pop()
            try:
                events = json.loads(folder.read(name, _MAX_TRACE))["traceEvents"]
                found.append(_timeline(name.removesuffix(".json"), events))
            except _NOT_A_TRACE:
                number -= 1  # a file of another program
    return found[::-1], number


def _timeline(name: str, events: Sequence[dict[str, Any]]) -> Timeline:
    spans = [e for e in events if e.get("ph") == "X"]
    places = sorted({(int(e["pid"]), int(e["tid"])) for e in spans})
    lane = {place: i for i, place in enumerate(places)}
    names, last = [], None
    for worker, _ in places:
        names.append(f"worker {worker - 1}" if worker != last else "")
        last = worker
    boxes = []
    for event in spans[:_BOXES]:
        args = event["args"]
        css = "f" if args.get("error") else "r" if args.get("attempt") else "a"
        start, seconds = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6
        if not math.isfinite(start + seconds):
            raise ValueError("a time that is not finite")
        title = f"{event['name']}, {seconds:.3g} s, {args.get('tokens')} tokens"
        place = int(event["pid"]), int(event["tid"])
        boxes.append(Box(start, start + seconds, lane[place], css, title))
    return Timeline(name, boxes, names, len(spans))
