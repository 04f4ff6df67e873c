"""The Hydra callback: installs SkipManager and the recorder of stages, and summarises at the end.

Hydra turns an `Exception` of a callback into a warning and runs the task nevertheless. So a job
whose config cannot be honoured is ended by :class:`RlskipAbort`, and the SkipManager that stays
behind refuses every call. Launchers send a pickled copy of the callback to their workers without
calling `__init__`, so everything is read from `config`, and nothing is kept between jobs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import attrs
from hydra.core.utils import JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from rlskip import stages
from rlskip.config.check import look_up
from rlskip.config.choices import chosen_options, is_typed
from rlskip.config.dump_dir import DIRECTORY_VARIABLE
from rlskip.config.facts import HostFacts
from rlskip.config.legacy import refuse_legacy_flags, retire_legacy_flags
from rlskip.config.option_checks import lost_choices
from rlskip.config.origin import ORIGIN_VARIABLE, Origin
from rlskip.config.record import read_record
from rlskip.config.settings import SkipSettings, has_own_key, read_skip
from rlskip.errors import RlskipAbort, RlskipError
from rlskip.hosts.verl import launcher
from rlskip.jobs.records import JOB_VARIABLE, SUMMARY, Tally, begin_job, end_job, rank_of, tally
from rlskip.skip.manager import SkipManager
from rlskip.skip.not_installed import chosen_by

log = logging.getLogger(__name__)


class SkipCallback(Callback):
    """Every option of `skip` and `record` adds it, under the key ``hydra.callbacks.rlskip``."""

    _origin: Origin | None = None

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Turn legacy flags off: only here is `config` the object that the task gets."""
        # Not by read_skip: other keys may need the job's HydraConfig, which is not set yet.
        on = look_up(config, "skip.rollout.enable") is True
        if on and look_up(config, "skip.enable") is not False:
            retire_legacy_flags(config, rollout_enabled=True)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._multirun_began = time.time()
        self._origin = Origin.of(None)  # a launcher's worker has another script

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Install SkipManager and the recorder, or end the job."""
        try:
            if config.hydra.get("mode") == RunMode.MULTIRUN:  # one name for several jobs
                os.environ.pop(JOB_VARIABLE, None)
            begin_job(lasts=True)
            os.environ[DIRECTORY_VARIABLE] = config.hydra.runtime.cwd
            os.environ.pop(ORIGIN_VARIABLE, None)  # of a job that started this application
            origin = Origin.of(config)
            if self._origin is not None:
                origin = attrs.evolve(self._origin, name=origin.name)
            os.environ[ORIGIN_VARIABLE] = origin.to_variable()
            settings = _read_skip(config)
            # Without the option, a key `record` is the application's own.
            recording = read_record(config if chosen_options(config, "record") else None)
            if "rollout" in settings.roles:
                # The task has its own copy of the config by now.
                refuse_legacy_flags(config)
            # verl trains in another process, maybe on another machine, and checks there.
            here = not launcher.starts_verl(settings)
            SkipManager._start(settings, flushes=True, checks=here)
            if SkipManager.skip_instances:
                launcher.before_job(settings)
            stages.start(recording, lambda: SkipManager.step)
        except Exception as error:
            _end(config, error)
        schema_alone = is_typed(config, "skip") and not settings.roles and not chosen_by(config)
        if schema_alone or (settings.node is None and recording.enable):
            return  # it was not chosen
        lost = "; ".join(map(str, lost_choices(settings)))
        if not SkipManager.skip_instances:
            log.warning("rlskip: NOTHING is skipped or cached in this job: %s", lost or "see above")
        elif lost:
            log.warning("rlskip: not all that was chosen is on: %s", lost)

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        """Log one line per role, and write ``rlskip_summary.json`` to the output directory."""
        try:
            SkipManager.flush()
        except Exception:
            log.exception("rlskip: the last dumps were not written")
        recorded = stages.directory()
        stages.stop()
        roles = dict(SkipManager.skip_instances)
        uncalled = SkipManager._uncalled()
        SkipManager.reset()
        job = end_job()
        for variable in (DIRECTORY_VARIABLE, ORIGIN_VARIABLE):
            os.environ.pop(variable, None)
        if not (roles or recorded):
            return
        dump_dirs = {role: skip.local_config.dump_dir for role, skip in roles.items()}
        tallies = tally(dump_dirs, job)
        for role, skip in roles.items():
            if skip.recorder is not None:
                tallies[role] += skip.recorder.unwritten
        launcher.after_job(
            job_return,
            consulted=any(counts.consulted for counts in tallies.values()),
            one_of_many=config.hydra.get("mode") == RunMode.MULTIRUN,
        )
        for role, counts in tallies.items():
            local, typed = roles[role].local_config, f"skip.{role}.steps"
            if counts.consulted and not (counts.hits or counts.misses):
                log.warning(
                    "rlskip: role %s: its function was called, but at no step that is listed: %s "
                    "lists %s",
                    role, typed if "steps" in local.given_keys else "skip.steps", local.steps,
                )  # fmt: skip
            elif counts.consulted:
                level = logging.WARNING if counts.lost else logging.INFO
                log.log(level, "rlskip: role %s: %s", role, counts)
            elif job_return.status == JobStatus.COMPLETED:
                log.warning(
                    "rlskip: role %s is enabled and was NEVER CONSULTED, so nothing was skipped or "
                    "cached in this job: %s",
                    role, uncalled,
                )  # fmt: skip
        never = any(
            skip.dumps is not None and skip.dumps.is_named_by_time for skip in roles.values()
        )
        new = any(counts.misses > counts.lost and not counts.hits for counts in tallies.values())
        if new and not never:
            log.info("rlskip: run it again to replay: %s", _command(config))
        if rank_of()[0] == 0:  # what others know is in the records of all
            _write_summary(Path(config.hydra.runtime.output_dir), job, tallies, recorded)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Log one table of all jobs of the sweep."""
        sweep = Path(config.hydra.sweep.dir)
        rows = []
        for file in sweep.rglob(SUMMARY):
            summary = json.loads(file.read_text(encoding="utf-8"))
            if summary["written"] >= self._multirun_began:
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


def _end(config: DictConfig, error: Exception) -> NoReturn:
    """End the job before its task starts, and show the reason once on the console."""
    reason = f"{type(error).__name__}: {error}"
    SkipManager._refuse(reason)
    unexpected = not isinstance(error, RlskipError)
    # What ends the process shows the reason, even if logging is off.
    with contextlib.nullcontext() if unexpected else _quiet_console():
        log.error("rlskip ends this job before it starts.\n%s", reason, exc_info=unexpected)
    if config.hydra.mode == RunMode.RUN:
        raise SystemExit(f"rlskip: {reason}") from error
    # Ray's launcher loses the message of a SystemExit and retries the job. The traceback of an
    # error of rlskip's own would only repeat the reason.
    raise RlskipAbort(reason) from (error if unexpected else None)


def _command(config: DictConfig) -> str:
    """The job's own command, to type again."""
    command = shlex.join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]])
    readable = config.hydra.get("mode") == RunMode.RUN and len(command) < 300
    return command if readable else "the same command replays what was generated"


def _read_skip(config: DictConfig) -> SkipSettings:
    """The settings of `skip`; none if a job that only records stages uses that key itself."""
    try:
        return read_skip(config)
    except RlskipError:
        if chosen_by(config) or not (chosen_options(config, "record") and has_own_key(config)):
            raise
        log.info("rlskip: `skip` is taken for the application's own key, as no option chose it")
        return SkipSettings(HostFacts(config))


@contextlib.contextmanager
def _quiet_console() -> Iterator[None]:
    """Within it, log records go to files and services only."""

    def drop(record: logging.LogRecord) -> bool:
        return False

    with contextlib.ExitStack() as undo:
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and not isinstance(
                handler, logging.FileHandler
            ):
                handler.addFilter(drop)
                undo.callback(handler.removeFilter, drop)
        yield


def _write_summary(
    output_dir: Path, job: str, tallies: dict[str, Tally], recorded: Path | None
) -> None:
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
