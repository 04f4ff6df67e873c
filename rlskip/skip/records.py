"""What the process that ran a stage has to tell: one JSON line an event, beside the dumps.

The process that starts a job is often not the one that trains (verl's driver only starts a
Ray actor). So counts are not kept in memory but written beside the dumps, and the
job's summary is made from there::

    {dump_dir}/records/{job}/{host}-{pid}-{random}.jsonl

A process that takes a role over in another process's stead acknowledges it, once::

    {dump_dir}/records/{job}/{role}.active

`job` comes from the environment variable ``RLSKIP_JOB``, which the Hydra callback sets and
child processes inherit.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

JOB_VARIABLE = "RLSKIP_JOB"
# No run's directory is called so: those have an underscore.
FOLDER = "records"

log = logging.getLogger(__name__)


def new_job_id() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def job_id() -> str:
    """The job this process belongs to; its own when nobody said."""
    return os.environ.setdefault(JOB_VARIABLE, new_job_id())


@attrs.frozen
class Tally:
    """The events of one role in one job, counted.

    `seconds_saved` is generation time that was not spent, less the time to load.
    """

    consulted: bool = False
    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds_saved: float = 0.0

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Tally:
        """One event, counted."""
        hit, miss, dumped = (event["event"] == kind for kind in ("hit", "miss", "dumped"))
        return cls(
            consulted=True,
            hits=int(hit),
            misses=int(miss),
            bytes_read=event.get("bytes", 0) if hit else 0,
            bytes_written=event.get("bytes", 0) if dumped else 0,
            seconds_saved=event.get("seconds_saved", 0.0),
        )

    def __add__(self, other: Tally) -> Tally:
        pairs = zip(attrs.astuple(self), attrs.astuple(other), strict=True)
        consulted, *sums = (mine + others for mine, others in pairs)
        return Tally(bool(consulted), *sums)

    def __str__(self) -> str:
        written = f", {_size(self.bytes_written)} written" if self.bytes_written else ""
        return (
            f"{self.hits} hits, {self.misses} misses, {_size(self.bytes_read)} read{written}, "
            f"{round(self.seconds_saved, 1) + 0.0:.1f} s of generation saved"  # never -0.0
        )


class Recorder:
    """Appends what this process has to tell of one role.

    `unwritten` counts what could not be written: then only this process knows of it.
    """

    def __init__(self, dump_dir: str | Path, role: str) -> None:
        self.unwritten = Tally()
        self._lock = threading.Lock()
        self._role = role
        self._folder = Path(dump_dir) / FOLDER / job_id()
        self._name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}.jsonl"

    def write(self, event: str, **facts: Any) -> None:
        """Append one line. A record that cannot be written never disturbs the run."""
        said = {"role": self._role, "event": event, "time": time.time(), **facts}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(self._folder / self._name, "a", encoding="utf-8") as file:
                file.write(json.dumps(said) + "\n")
        except OSError as error:
            with self._lock:
                if not self.unwritten.consulted:
                    log.warning(
                        "rlskip: role %s: no records can be written, so `rlskip ls` and `rlskip "
                        "report` will not know of this job: %s",
                        self._role, error,
                    )  # fmt: skip
                self.unwritten += Tally.of(said)


def acknowledge(dump_dir: str | Path, role: str, **facts: Any) -> None:
    """Leave word that this process acts for `role` in the present job.

    Raises
    ------
    OSError
        It cannot be written, and then dumps cannot either.
    """
    folder = Path(dump_dir) / FOLDER / job_id()
    folder.mkdir(parents=True, exist_ok=True)
    said = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time(), **facts}
    (folder / f"{role}.active").write_text(json.dumps(said) + "\n", encoding="utf-8")


def acknowledged(dump_dir: str | Path, role: str, job: str) -> bool:
    """Whether a process of `job` left word that it acts for `role`."""
    return (Path(dump_dir) / FOLDER / job / f"{role}.active").exists()


def tally(dump_dirs: Mapping[str, str], job: str) -> dict[str, Tally]:
    """Count the events of `job` over all processes that wrote any.

    `dump_dirs` says for each role where its dumps and records lie.
    """
    tallies = {role: Tally() for role in dump_dirs}
    for directory in set(dump_dirs.values()):
        for file in sorted((Path(directory) / FOLDER / job).glob("*.jsonl")):
            for line in file.read_text(encoding="utf-8").splitlines():
                _count(line, tallies)
    return tallies


def _count(line: str, tallies: dict[str, Tally]) -> None:
    try:
        event = json.loads(line)
        role = event["role"]
    except (ValueError, KeyError, TypeError):
        return  # the torn last line of a process that was killed
    if role not in tallies:
        return
    tallies[role] += Tally.of(event)


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
