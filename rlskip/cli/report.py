"""`rlskip report`: one page about a run, to open anywhere and to send to anybody."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from rlskip.cli.charts import Box
from rlskip.cli.dumps import Dump, Run
from rlskip.cli.records import Told, read_records
from rlskip.cli.rows import Decoder, Row, columns_of, lengths_of, rewards_of, rows_at
from rlskip.cli.screen import Answer, progress, size, text
from rlskip.store import DumpError

MAX_VALUES = 100_000  # rows whose length and reward are counted, the latest steps first
_TIMELINES = 6
_BOXES = 5_000


@attrs.frozen
class StepFigures:
    """A step: seconds that generating it took, rows, and what replays of it saved."""

    step: int
    seconds: float | None
    size: int
    rows: int | None
    told: Told
    problem: str | None


@attrs.frozen
class Sampled:
    """A row to read: its tokens cut at so many, and the text of its parts where decoded.

    ``turns`` are runs of the response: whether they were sampled, and what they say.
    """

    step: int
    row: Row
    prompt: str
    turns: list[tuple[bool, str]]


@attrs.frozen
class Timeline:
    """The dispatch of one step: attempts as boxes, of so many that there were."""

    name: str
    boxes: list[Box]
    lanes: list[str]
    attempts: int


@attrs.frozen
class Report:
    """All that the page shows."""

    run: Run
    steps: list[StepFigures]
    told: Told
    lengths: list[int]
    rewards: list[float]
    counted: int
    sample: list[Sampled]
    decoded: bool
    timelines: list[Timeline]  # the last ones, of so many that there are
    all_timelines: int


def report(
    run: Run, out: Path, *, rows: int, decoder: Decoder | None, timeline_dir: Path | None
) -> Answer:
    """Write the page to `out`, in place of a page that is there."""
    from rlskip.cli.page import render

    made = look(run, rows, decoder, timeline_dir)
    content = render(made).encode("utf-8", "replace")
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f"{out.name}.{secrets.token_hex(4)}")
    try:
        aside.write_bytes(content)
        os.replace(aside, out)
    finally:
        aside.unlink(missing_ok=True)
    data = {
        "file": str(out),
        "bytes": len(content),
        "steps": len(made.steps),
        "hits": made.told.hits,
        "misses": made.told.misses,
        "seconds_saved": made.told.seconds_saved,
        "rows_counted": made.counted,
        "rows_shown": len(made.sample),
        "timelines": [timeline.name for timeline in made.timelines],
    }
    what = f"{len(made.steps)} steps, {len(made.sample)} rows shown"
    return Answer(data, [text(f"{out}: {what}, {size(len(content))}")])


def look(run: Run, rows: int, decoder: Decoder | None, timeline_dir: Path | None) -> Report:
    """Read the run's dumps and records; a dump that cannot be read is said to be so."""
    records = read_records(run.dump_dir)
    dumps = run.dumps()
    figures: dict[str, StepFigures] = {}
    lengths: list[int] = []
    rewards: list[float] = []
    sample: list[Sampled] = []
    counted = 0
    each = -(-rows // max(1, len(dumps))) if rows else 0
    for dump in progress(dumps[::-1], "reading"):
        columns, problem = None, dump.problem
        # The latest steps first: they are what a limit must not leave out.
        if problem is None and (counted < MAX_VALUES or len(sample) < rows):
            try:
                columns = columns_of(dump.load())
            except DumpError as error:
                problem = error.what
        if columns is not None:
            if counted < MAX_VALUES:
                counted += columns.n
                lengths += lengths_of(columns)
                rewards += rewards_of(columns)
            places = _spread(columns.n, min(each, rows - len(sample)))
            sample += [_sampled(dump.step, row, decoder) for row in rows_at(columns, places)]
        figures[dump.name] = _figures(dump, columns.n if columns else None, problem, run, records)
    return Report(
        run,
        list(figures.values())[::-1],
        records.of_run(run.name),
        lengths,
        rewards,
        counted,
        sorted(sample, key=lambda one: (one.step, one.row.index)),
        decoder is not None,
        *_timelines(timeline_dir or run.directory),
    )


def _figures(
    dump: Dump, rows: int | None, problem: str | None, run: Run, records: Any
) -> StepFigures:
    seconds = dump.meta.info.get("seconds") if dump.meta else None
    told = records.of_step(run.name, dump.step)
    if dump.place.inner or dump.place.rank:
        told = Told()  # told once for a step, however many parts it has
    return StepFigures(dump.step, seconds or None, dump.size, rows, told, problem)


def _spread(n: int, wanted: int) -> list[int]:
    """So many of n rows, evenly over all."""
    wanted = min(n, wanted)
    return [i * n // wanted for i in range(wanted)]


_SHOWN = 3_000  # tokens of a prompt or a response


def _sampled(step: int, row: Row, decoder: Decoder | None) -> Sampled:
    def say(tokens: Sequence[int]) -> str:
        return decoder(tokens) if decoder is not None else " ".join(map(str, tokens))

    response = row.response[:_SHOWN]
    mask = row.mask[:_SHOWN] if row.mask is not None else [1] * len(response)
    turns: list[tuple[bool, str]] = []
    start = 0
    for i in range(1, len(response) + 1):
        if i == len(response) or mask[i] != mask[start]:
            turns.append((bool(mask[start]), say(response[start:i])))
            start = i
    return Sampled(step, row, say(row.prompt[-_SHOWN:]), turns)


# -- the dispatch timeline ------------------------------------------------------------------


def _timelines(folder: Path) -> tuple[list[Timeline], int]:
    """The last of what ``dispatch.timeline_dir`` holds, and how many there are.

    They are traces called ``{partition}-{step}.json``.
    """
    found: list[Timeline] = []
    files = [f for f in folder.glob("*-*.json") if f.stem.rpartition("-")[2].isdigit()]
    files.sort(key=lambda f: (int(f.stem.rpartition("-")[2]), f.stem))
    there = len(files)
    while files and len(found) < _TIMELINES:
        file = files.pop()
        try:
            events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
            found.append(_timeline(file.stem, events))
        except (OSError, ValueError, KeyError, TypeError):
            there -= 1  # another program's file
    return found[::-1], there


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
        start = float(event["ts"]) / 1e6
        title = f"{event['name']}, {float(event['dur']) / 1e6:.3g} s, {args.get('tokens')} tokens"
        boxes.append(
            Box(
                start,
                start + float(event["dur"]) / 1e6,
                lane[int(event["pid"]), int(event["tid"])],
                css,
                title,
            )
        )
    return Timeline(name, boxes, names, len(spans))
