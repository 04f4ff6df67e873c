"""What jobs told beside the dumps: hits, misses and time saved, by run and step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from rlskip.skip.records import FOLDER


@attrs.define
class Told:
    """Of one step (or of all together): how often it was replayed and generated."""

    hits: int = 0
    misses: int = 0
    seconds_saved: float = 0.0


@attrs.frozen
class Records:
    """The records in one dump_dir.

    ``steps`` holds, for each run, what was told of the step whose dump was replayed (a hit) or
    that was generated (a miss).
    """

    steps: dict[str, dict[int, Told]]
    jobs: list[str]

    def of_run(self, run: str) -> Told:
        told = list(self.steps.get(run, {}).values())
        return Told(
            sum(one.hits for one in told),
            sum(one.misses for one in told),
            sum(one.seconds_saved for one in told),
        )

    def of_step(self, run: str, step: int) -> Told:
        return self.steps.get(run, {}).get(step, Told())


def read_records(dump_dir: Path) -> Records:
    """All records below a dump_dir; none where there are none."""
    folder = dump_dir / FOLDER
    steps: dict[str, dict[int, Told]] = {}
    for file in sorted(folder.glob("*/*.jsonl")):
        # A file is one process's and one role's; it begins with the run they write to.
        run = None
        for event in _events(file):
            run = event.get("run", run)
            kind, step = event.get("event"), event.get("source", event.get("step"))
            if run is None or not isinstance(step, int) or kind not in ("hit", "miss"):
                continue
            told = steps.setdefault(run, {}).setdefault(step, Told())
            if kind == "miss":
                told.misses += 1
            else:
                told.hits += 1
                told.seconds_saved += float(event.get("seconds_saved") or 0.0)
    jobs = [path.name for path in sorted(folder.glob("*")) if path.is_dir()]
    return Records(steps, jobs)


def _events(file: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue  # the torn last line of a process that was killed
        if isinstance(event, dict):
            yield event
