"""What is logged and written at the end of a job, and of a multirun."""

from __future__ import annotations

import json
import logging
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from hydra.types import RunMode
from omegaconf import DictConfig

from rlskip.jobs.records import SUMMARY, Tally

log = logging.getLogger(__name__)


def log_roles(
    config: DictConfig,
    roles: Mapping[str, Any],
    tallies: Mapping[str, Tally],
    uncalled: str,
    completed: bool,
) -> None:
    """Log one line per role, and the command that replays what is new."""
    for role, counts in tallies.items():
        local, typed = roles[role].local_config, f"skip.{role}.steps"
        if completed and counts.consulted and not (counts.hits or counts.misses):
            log.warning(
                "rlskip: role %s: its function was called, but at no step that is listed: %s "
                "lists %s",
                role, typed if "steps" in local.given_keys else "skip.steps", local.steps,
            )  # fmt: skip
        elif counts.consulted:
            level = logging.WARNING if counts.lost else logging.INFO
            log.log(level, "rlskip: role %s: %s", role, counts)
        elif completed:
            log.warning(
                "rlskip: role %s is enabled and was NEVER CONSULTED, so nothing was skipped or "
                "cached in this job: %s",
                role, uncalled,
            )  # fmt: skip
    never = any(skip.dumps is not None and skip.dumps.is_named_by_time for skip in roles.values())
    new = any(counts.misses > counts.lost and not counts.hits for counts in tallies.values())
    if new and not never:
        log.info("rlskip: run it again to replay: %s", _command(config))


def log_jobs(sweep: Path, since: float) -> None:
    """Log one table of the jobs of a sweep that ended after the time `since`."""
    rows = []
    for file in sweep.rglob(SUMMARY):
        summary = json.loads(file.read_text(encoding="utf-8"))
        if summary["written"] >= since:
            rows += [
                (str(file.parent.relative_to(sweep)), role, counts)
                for role, counts in summary["roles"].items()
            ]
    if not rows:
        return
    wide = 2 + max(10, *(len(job) for job, *_ in rows))
    lines = [f"{'job':<{wide}}{'role':<16}{'hits':>6}{'misses':>8}{'saved s':>10}"]
    # Shorter names first, so that job 10 comes after job 2.
    for job, role, counts in sorted(rows, key=lambda row: (len(row[0]), row[0], row[1])):
        lines.append(
            f"{job:<{wide}}{role:<15} {counts['hits']:>6}{counts['misses']:>8}"
            f"{max(0.0, counts['seconds_saved']):>10.1f}"
        )
    log.info("rlskip, over the jobs of this sweep:\n%s", "\n".join(lines))


def _command(config: DictConfig) -> str:
    """The job's own command, to type again."""
    command = shlex.join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]])
    readable = config.hydra.get("mode") == RunMode.RUN and len(command) < 300
    return command if readable else "the same command replays what was generated"


def write_summary(
    output_dir: Path, job: str, tallies: dict[str, Tally], recorded: Path | None
) -> None:
    """Write what the table of a sweep, and others, read."""
    summary = {
        "job": job,
        "stages": None if recorded is None else str(recorded),
        "written": time.time(),
        "roles": {role: attrs.asdict(counts) for role, counts in tallies.items()},
    }
    try:
        (output_dir / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        log.warning("rlskip: %s could not be written: %s", output_dir / SUMMARY, error)
