"""The Hydra callback: installs SkipManager and the recorder of stages, and writes a summary.

Launchers send a pickled copy of the callback to their workers without calling `__init__`, so
everything is read from `config`, and nothing is kept between jobs.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import attrs
from hydra.core.utils import JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from rlskip import stages
from rlskip.config.check import look_up
from rlskip.config.dump_dir import DIRECTORY_VARIABLE
from rlskip.config.facts import ORIGIN_VARIABLE, HostFacts, Origin, retire_legacy_flag
from rlskip.config.nodes import read_record, record_chosen_by
from rlskip.config.settings import SkipSettings, has_own_key, read_skip, why_off
from rlskip.errors import RlskipAbort, RlskipError
from rlskip.hosts.verl import handshake
from rlskip.jobs.records import JOB_VARIABLE, SUMMARY, Tally, begin_job, end_job, rank_of, tally
from rlskip.skip.manager import SkipManager
from rlskip.skip.said import chosen_by, warn_of_unlisted, warn_of_unmet, why_uncalled

log = logging.getLogger(__name__)


class SkipCallback(Callback):
    """Every option of `skip` and `record` adds it, under the key ``hydra.callbacks.rlskip``."""

    _origin: Origin | None = None

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Turn verl's legacy flag off: only here is `config` the object that the task gets."""
        # Not by read_skip: other keys may need the job's HydraConfig, which is not set yet.
        on = look_up(config, "skip.rollout.enable") is True
        if on and look_up(config, "skip.enable") is not False:
            retire_legacy_flag(config)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._multirun_began = time.time()
        self._origin = Origin.of(None)  # a launcher's worker has another script

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Install SkipManager and the recorder, or end the job.

        Hydra turns an `Exception` of a callback into a warning and runs the task nevertheless. So
        a job whose config cannot be honoured is ended by SystemExit or
        :class:`~rlskip.errors.RlskipAbort`, and the SkipManager that stays behind refuses every
        call.
        """
        try:
            settings = _start(config, self._origin)
        except Exception as error:
            _refuse(config, error)
        asked = settings.roles or chosen_by(config)
        if asked and (why := "; ".join(map(str, why_off(settings)))):
            nothing = "" if settings.roles else "NOTHING is skipped or cached in this job: "
            log.warning("rlskip: %s%s", nothing, why)

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        """Log one line per role, and write ``rlskip_summary.json`` to the output directory."""
        try:
            SkipManager.flush()
        except Exception:
            log.exception("rlskip: the last dumps were not written")
        recorded = stages.directory()
        stages.stop()
        roles = dict(SkipManager.skip_instances)
        uncalled = why_uncalled(SkipManager.bypassed)
        warn_of_unmet(roles)
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
        one_of_many = config.hydra.get("mode") == RunMode.MULTIRUN
        handshake.after_job(job_return, one_of_many)
        _log_roles(config, roles, tallies, uncalled, job_return.status == JobStatus.COMPLETED)
        if rank_of()[0] != 0:  # what others know is in the records of all
            return
        summary = {
            "job": job,
            "stages": None if recorded is None else str(recorded),
            "written": time.time(),
            "roles": {role: attrs.asdict(counts) for role, counts in tallies.items()},
        }
        file = Path(config.hydra.runtime.output_dir, SUMMARY)
        try:
            file.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            log.warning("rlskip: %s could not be written: %s", file, error)

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


def _start(config: DictConfig, launched_from: Origin | None) -> SkipSettings:
    """Install SkipManager and the recorder, as a job's config says.

    In a multirun, `launched_from` is the origin of the process that launches the jobs.
    """
    if config.hydra.get("mode") == RunMode.MULTIRUN:  # one name for several jobs
        os.environ.pop(JOB_VARIABLE, None)
    begin_job(lasts=True)
    os.environ[DIRECTORY_VARIABLE] = config.hydra.runtime.cwd
    os.environ.pop(ORIGIN_VARIABLE, None)  # of a job that started this application
    origin = Origin.of(config)
    if launched_from is not None:
        origin = attrs.evolve(launched_from, name=origin.name)
    os.environ[ORIGIN_VARIABLE] = json.dumps(attrs.astuple(origin))
    try:
        settings = read_skip(config)
    except RlskipError:
        if chosen_by(config) or not (record_chosen_by(config) and has_own_key(config)):
            raise
        log.info("rlskip: `skip` is taken for the application's own key, as no option chose it")
        settings = SkipSettings(HostFacts(config))
    recording = read_record(config if record_chosen_by(config) else None)
    if "rollout" in settings.roles:
        # The task has its own copy of the config by now.
        retire_legacy_flag(config, reaches_task=False)
    # verl trains in another process, maybe on another machine, and checks there.
    there = handshake.starts_verl(settings)
    SkipManager._start(settings, flushes=True, checks=not there)
    if there and SkipManager.skip_instances:
        handshake.before_job(settings)
    stages.start(recording, lambda: SkipManager.step)
    return settings


def _refuse(config: DictConfig, error: Exception) -> NoReturn:
    """End the job before its task starts, and show the reason once on the console."""
    reason = f"{type(error).__name__}: {error}"
    SkipManager._refuse(reason)
    unexpected = not isinstance(error, RlskipError)
    # What ends the process shows the reason, even if logging is off: so files and services get it.
    console = [h for h in logging.getLogger().handlers if type(h) is logging.StreamHandler]
    levels = [handler.level for handler in console]
    for handler in () if unexpected else console:
        handler.setLevel(logging.CRITICAL)
    log.error("rlskip ends this job before it starts.\n%s", reason, exc_info=unexpected)
    for handler, level in zip(console, levels, strict=True):
        handler.setLevel(level)
    if config.hydra.mode == RunMode.RUN:
        raise SystemExit(f"rlskip: {reason}") from error
    # Ray's launcher loses the message of a SystemExit and retries the job. The traceback of an
    # error of rlskip's own would only repeat the reason.
    raise RlskipAbort(reason) from (error if unexpected else None)


def _log_roles(
    config: DictConfig,
    roles: Mapping[str, Any],
    tallies: Mapping[str, Tally],
    uncalled: str,
    completed: bool,
) -> None:
    """Log one line per role, and the command that replays what is new."""
    for role, counts in tallies.items():
        if completed and counts.consulted and not (counts.hits or counts.misses):
            warn_of_unlisted(role, roles[role].local_config)
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
        command = shlex.join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]])
        if config.hydra.get("mode") != RunMode.RUN or len(command) >= 300:
            command = "the same command replays what was generated"
        log.info("rlskip: run it again to replay: %s", command)
