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
from rlskip.runs.decoding import Decoder
from rlskip.runs.on_disk import Dump, Run
from rlskip.runs.trajectories import (
    Columns,
    Session,
    Trajectory,
    columns_of,
    mean,
    rows_at,
    session_lengths,
    session_rewards,
    sessions_of,
)
from rlskip.store import DumpError

MAX_VALUES = 100_000  # sessions whose length and reward are counted, the latest steps first
_TIMELINES = 6
_TRACE = re.compile(r".+-\d{1,18}\.json")
_MAX_TRACE = 256 << 20  # bytes
_NOT_A_TRACE = (
    OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip
_BOXES = 5_000


@attrs.frozen
class StepFigures:
    """A dump: the seconds that generating it took, its sessions, its hits and misses."""

    name: str
    step: int
    seconds: float | None
    size: int
    sessions: int | None
    reward: float | None  # the mean of its sessions
    tally: Tally
    problem: str | None


@attrs.frozen
class Sampled:
    """The last row of a session, as token ids or text; long ones are cut.

    ``parts`` are those of the response: whether the policy sampled them, and their text.
    ``reward`` and ``length`` are the session's.
    """

    dump: str  # its name
    session: Session
    row: Trajectory
    reward: float | None
    length: int
    prompt: str
    parts: list[tuple[bool, str]]


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
    lengths: list[int]
    rewards: list[float]
    counted: int  # sessions
    groups: int
    sample: list[Sampled]
    decoded: bool
    timelines: list[Timeline]
    all_timelines: int

    @property
    def steps_dumped(self) -> int:
        return len({one.step for one in self.steps})


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
    lengths: list[int] = []
    rewards: list[float] = []
    sample: list[Sampled] = []
    counted = groups = 0
    each = -(-rows // max(1, len(dumps))) if rows else 0
    # The latest steps first: a limit must not leave them out.
    for dump in progress(dumps[::-1]):
        columns, problem = None, dump.problem
        if problem is None and (counted < MAX_VALUES or len(sample) < rows):
            try:
                columns = columns_of(dump.load())
            except DumpError as error:
                problem = error.what
        sessions, given = [], []
        if columns is not None:
            sessions = sessions_of(columns)
            given = session_rewards(columns, sessions)
            if counted < MAX_VALUES:
                counted += len(sessions)
                groups += len({one.group for one in sessions})
                lengths += session_lengths(columns, sessions)
                rewards += [r for r in given if r is not None]
            picked = _spread(len(sessions), min(each, rows - len(sample)))
            some = [sessions[i] for i in picked]
            sample = _sampled(dump.name, columns, some, decoder) + sample
        n = len(sessions) if columns else None
        figures.append(
            StepFigures(
                dump.name,
                dump.step,
                dump.seconds,
                dump.size,
                n,
                mean(given),
                _tally(dump, tallies),
                problem,
            )
        )
    return Report(
        run,
        figures[::-1],
        sum(tallies.values(), Tally()),
        lengths,
        rewards,
        counted,
        groups,
        sample,
        decoder is not None,
        *_timelines(timeline_dir or run.directory),
    )


def _tally(dump: Dump, tallies: StepTallies) -> Tally:
    """Each event in one row: a call's at the first rank's shard, a step's at the first call."""
    parts = [] if dump.place.rank else [dump.call] if dump.call else [0, None]
    return sum((tallies.get((dump.step, part), Tally()) for part in parts), Tally())


def _spread(n: int, wanted: int) -> list[int]:
    """The indices of `wanted` of n rows, evenly spaced."""
    wanted = min(n, wanted)
    return [i * n // wanted for i in range(wanted)]


_SHOWN = 3_000  # tokens of a prompt or a response


def _sampled(
    dump: str, columns: Columns, sessions: Sequence[Session], decoder: Decoder | None
) -> list[Sampled]:
    rows = rows_at(columns, [one.rows[-1] for one in sessions])
    rewards, lengths = session_rewards(columns, sessions), session_lengths(columns, sessions)
    return [
        Sampled(dump, *found, *_texts(found[1], decoder))
        for found in zip(sessions, rows, rewards, lengths, strict=False)
    ]


def _texts(row: Trajectory, decoder: Decoder | None) -> tuple[str, list[tuple[bool, str]]]:
    def as_text(tokens: Sequence[int]) -> str:
        return decoder(tokens) if decoder is not None else " ".join(map(str, tokens))

    response = row.response[:_SHOWN]
    mask = (row.mask or [])[:_SHOWN]
    mask += [1] * (len(response) - len(mask))
    parts: list[tuple[bool, str]] = []
    start = 0
    for i in range(1, len(response) + 1):
        if i == len(response) or mask[i] != mask[start]:
            parts.append((bool(mask[start]), as_text(response[start:i])))
            start = i
    return as_text(row.prompt[-_SHOWN:]), parts


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
