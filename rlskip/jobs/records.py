"""The records of hits and misses: one JSON line for each event, next to the dumps.

The process that starts a job is often not the one that trains (verl's launcher process only starts
a Ray actor). So events are not counted in memory but appended to files in the dump_dir, of which
the job's summary, ``rlskip ls`` and ``rlskip report`` are made. `job` comes from the environment
variable ``RLSKIP_JOB``, which the user may set, and which child processes inherit::

    {dump_dir}/records/{job}/
        {host}-{pid}-{random}.jsonl    of one process and role; the first line names the run
        {who}.token                    left for those of the job that must see the same dump_dir
"""

from __future__ import annotations

import contextlib
import json
import logging
import operator
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs.validators import and_, ge, instance_of, lt, optional

from rlskip._files import open_folder, safe_name
from rlskip._human import counted, size
from rlskip.jobs.ranks import shard

JOB_VARIABLE = "RLSKIP_JOB"
FOLDER = "records"  # no run's directory has this name: those contain an underscore
# The file of a Hydra output directory with what a job counted, and where its stages are.
SUMMARY = "rlskip_summary.json"
_MAX_FILE = 256 << 20  # bytes; a line has about 150

log = logging.getLogger(__name__)


# -- the job of this process -------------------------------------------------------------------


_MADE_UP = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}")


@attrs.define
class _Job:
    """A job that began in this process; `number` counts those before it."""

    number: int
    lasts: bool
    id: str = attrs.field(
        factory=lambda: f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
    )
    process: int = attrs.field(factory=os.getpid)
    is_settled: bool = False


_began: _Job | None = None
_lock = threading.Lock()


def begin_job(*, lasts: bool = False) -> None:
    """Begin another job in this process, unless it has a name that was given to it.

    If it `lasts`, what begins until :func:`end_job` is part of it. Then a name counts as given only
    if the user names the job of several ranks: one that is left in the environment, or of the job
    that started this process, would join one run to the next.
    """
    global _began
    given, ours = os.environ.get(JOB_VARIABLE), _ours()
    is_new = given is None or (ours is not None and not ours.lasts)
    if is_new or (lasts and (rank_of()[1] == 1 or _MADE_UP.fullmatch(str(given)))):
        _began = _Job(0 if _began is None else _began.number + 1, lasts)
        os.environ[JOB_VARIABLE] = _began.id


def job_id() -> str:
    """The job of this process, as its directories are called; a new one if none has begun.

    All ranks of torch.distributed are one job, from the first call on that finds them joined.
    """
    if JOB_VARIABLE not in os.environ:
        begin_job()
    if (ours := _ours()) is not None:
        with _lock:
            # A process that has not joined its ranks yet may still do so.
            if not ours.is_settled and shard()[1] > 1:
                os.environ[JOB_VARIABLE] = ours.id = _agreed(ours)
                ours.is_settled = True
    return safe_name(os.environ[JOB_VARIABLE])


def end_job() -> str:
    """End the job that lasts until now; its id."""
    job = job_id()
    if _ours() is not None:
        del os.environ[JOB_VARIABLE]
    return job


def _ours() -> _Job | None:
    """The present job if it began in this process, which has not inherited it."""
    present = os.environ.get(JOB_VARIABLE), os.getpid()
    return _began if _began is not None and (_began.id, _began.process) == present else None


def _agreed(job: _Job) -> str:
    """What the first of the ranks that asks calls the job."""
    key, dist = f"rlskip/job/{job.number}", sys.modules["torch.distributed"]
    try:
        store = dist.distributed_c10d._get_default_store()
        # Of all ranks exactly one gets a 1; `get` waits until that one has set its name.
        if store.add(f"{key}/asked", 1) == 1:
            store.set(key, job.id)
        return str(store.get(key).decode())
    except Exception as error:
        log.warning("rlskip: this rank is recorded as a job of its own: %s", error)
        return job.id


def rank_of() -> tuple[int, int]:
    """This process's rank in its job, and how many ranks that has."""
    if (joined := shard())[1] > 1:
        return joined
    rank, world = (int(os.environ.get(name) or 0) for name in ("RANK", "WORLD_SIZE"))
    return rank, max(world, rank + 1)


# -- events ------------------------------------------------------------------------------------


@attrs.frozen
class Tally:
    """Events counted: of a role in a job, or of a call or a whole step of a run.

    `seconds_saved` is the generation time that was not spent, less the time to load; `lost` are the
    misses whose rollouts could not be dumped.
    """

    consulted: bool = attrs.field(default=False, converter=bool)
    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds_saved: float = 0.0
    lost: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(*map(operator.add, attrs.astuple(self), attrs.astuple(other)))

    def __str__(self) -> str:
        written = f", {size(self.bytes_written)} written" if self.bytes_written else ""
        lost = f" ({self.lost} NOT dumped)" if self.lost else ""
        return (
            f"{counted(self.hits, 'hit')}, {counted(self.misses, 'miss')}{lost}, "
            f"{size(self.bytes_read)} read{written}, "
            f"{max(0.0, self.seconds_saved):.1f} s of generation saved"
        )


_TEXT = instance_of(str)
_COUNT = and_(instance_of(int), ge(0), lt(1 << 63))


@attrs.frozen
class Event:
    """One line of the records.

    Its `kind` is ``consulted``, ``hit``, ``miss``, ``dumped``, or ``lost``: it could not be dumped.
    `step` and `call` are those whose dump was replayed or written; the call is None where the event
    concerns the whole step: a miss, and a hit of role ``rollout_tq``. `nbytes` are those of the
    dump's files, read or written.
    """

    role: str = attrs.field(validator=_TEXT)
    kind: str = attrs.field(validator=_TEXT)
    run: str | None = attrs.field(default=None, validator=optional(_TEXT))
    step: int | None = attrs.field(default=None, validator=optional(_COUNT))
    call: str | None = attrs.field(default=None, validator=optional(_TEXT))
    nbytes: int = attrs.field(default=0, validator=_COUNT)
    seconds_saved: float = attrs.field(
        default=0.0, converter=float, validator=[ge(-float(1 << 63)), lt(float(1 << 63))]
    )

    @property
    def tally(self) -> Tally:
        return Tally(
            consulted=True,
            hits=int(self.kind == "hit"),
            misses=int(self.kind == "miss"),
            bytes_read=self.nbytes if self.kind == "hit" else 0,
            bytes_written=self.nbytes if self.kind == "dumped" else 0,
            seconds_saved=self.seconds_saved,
            lost=int(self.kind == "lost"),
        )


_NOT_AN_EVENT = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)


def read_events(dump_dir: str | Path, job: str | None = None) -> Iterator[Event]:
    """The events of `job`, by default of all; what cannot be read is skipped."""
    for name in _names(dump_dir, FOLDER) if job is None else [job]:
        for file in (one for one in _names(dump_dir, FOLDER, name) if one.endswith(".jsonl")):
            run, text = None, ""
            with contextlib.suppress(OSError), open_folder(dump_dir, FOLDER, name) as folder:
                text = folder.read(file, _MAX_FILE).decode("utf-8", "replace")
            for line in text.splitlines():
                with contextlib.suppress(*_NOT_AN_EVENT):  # a torn line, or another program's
                    said = json.loads(line)
                    event = Event(
                        said["role"], said["event"], said.get("run") or run,
                        said.get("source", said.get("step")), said.get("call"),
                        said.get("bytes", 0), said.get("seconds_saved", 0.0),
                    )  # fmt: skip
                    run = event.run
                    yield event


def _names(dump_dir: str | Path, *parts: str) -> list[str]:
    with contextlib.suppress(OSError), open_folder(dump_dir, *parts) as folder:
        return sorted(folder.names())
    return []


def tally(dump_dirs: Mapping[str, str], job: str) -> dict[str, Tally]:
    """The events of `job` by role, over all processes; `dump_dirs` has each role's."""
    return {
        role: sum((e.tally for e in read_events(path, job) if e.role == role), Tally())
        for role, path in dump_dirs.items()
    }


#: By step and call, as :class:`Event` has them.
StepTallies = dict[tuple[int, str | None], Tally]


def tally_steps(dump_dir: Path) -> dict[str, StepTallies]:
    """The hits and misses of all jobs in a dump_dir by run, and by step and call of it."""
    steps: dict[str, StepTallies] = {}
    for event in read_events(dump_dir):
        if event.run is not None and event.step is not None and event.kind in ("hit", "miss"):
            of_run, key = steps.setdefault(event.run, {}), (event.step, event.call)
            of_run[key] = of_run.get(key, Tally()) + event.tally
    return steps


# -- what a process writes ---------------------------------------------------------------------


class Recorder:
    """Appends the events of one role in this process; `unwritten` are those that it could not."""

    def __init__(self, dump_dir: str | Path, role: str) -> None:
        self.unwritten = Tally()
        self._lock = threading.Lock()
        self._role, self._dump_dir, self._job = role, dump_dir, job_id()
        self._name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}.jsonl"

    def write(self, event: str, **facts: Any) -> None:
        """Append one line. A record that cannot be written costs a warning, never the run."""
        record = {"role": self._role, "event": event, "time": time.time(), **facts}
        # A line that was written in part ends here. No other process writes to the file.
        start = "\n" if self.unwritten.consulted else ""
        try:
            _append(self._dump_dir, self._job, self._name, f"{start}{json.dumps(record)}\n")
        except (OSError, TypeError, ValueError) as error:
            counted = facts.get("bytes", 0), facts.get("seconds_saved", 0.0)
            with self._lock:
                is_first = not self.unwritten.consulted
                self.unwritten += Event(self._role, event, None, None, None, *counted).tally
            if is_first:
                log.warning(
                    "rlskip: role %s: no records can be written, so `rlskip ls` and `rlskip "
                    "report` will not know of this job: %s",
                    self._role, error,
                )  # fmt: skip


def leave_token(dump_dir: str | Path, who: str) -> bool:
    """Leave a token of the present job; False where it cannot be written: nobody should look."""
    with contextlib.suppress(OSError):
        _append(dump_dir, job_id(), f"{who}.token", f"{socket.gethostname()} {os.getpid()}\n")
        return True
    return False


def has_token(dump_dir: str | Path, who: str, job: str, within_s: float = 0.0) -> bool:
    """Whether a process of `job` left this token here, or another host shows it `within_s`."""
    deadline = time.monotonic() + within_s
    while f"{who}.token" not in _names(dump_dir, FOLDER, job):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
    return True


def _append(dump_dir: str | Path, job: str, name: str, line: str) -> None:
    with open_folder(dump_dir, FOLDER, job, create=True) as folder, folder.open(name, "a") as file:
        file.write(line.encode())
