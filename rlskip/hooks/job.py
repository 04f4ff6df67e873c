"""What a job does at its start and its end: SkipManager and the recorder come and go."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any, NoReturn

import attrs
from hydra.core.utils import JobStatus
from hydra.types import RunMode
from omegaconf import DictConfig

from rlskip import stages
from rlskip.config.dump_dir import DIRECTORY_VARIABLE
from rlskip.config.facts import ORIGIN_VARIABLE, HostFacts, Origin, retire_legacy_flag
from rlskip.config.nodes import read_record, record_chosen_by
from rlskip.config.settings import SkipSettings, has_own_key, read_skip
from rlskip.errors import RlskipAbort, RlskipError
from rlskip.hooks.summary import log_roles, write_summary
from rlskip.hosts.verl import handshake
from rlskip.jobs.records import JOB_VARIABLE, begin_job, end_job, rank_of, tally
from rlskip.skip.manager import SkipManager
from rlskip.skip.said import chosen_by, why_uncalled

log = logging.getLogger(__name__)


def start(config: DictConfig, launched_from: Origin | None) -> SkipSettings:
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
    settings = _read_skip(config)
    recording = read_record(config if record_chosen_by(config) else None)
    if "rollout" in settings.roles:
        # The task has its own copy of the config by now.
        retire_legacy_flag(config, reaches_task=False)
    # verl trains in another process, maybe on another machine, and checks there.
    here = not handshake.starts_verl(settings)
    SkipManager._start(settings, flushes=True, checks=here)
    if SkipManager.skip_instances:
        handshake.before_job(settings)
    stages.start(recording, lambda: SkipManager.step)
    return settings


def end(config: DictConfig, job_return: Any) -> None:
    """Take SkipManager and the recorder away, and log what they did."""
    try:
        SkipManager.flush()
    except Exception:
        log.exception("rlskip: the last dumps were not written")
    recorded = stages.directory()
    stages.stop()
    roles = dict(SkipManager.skip_instances)
    uncalled = why_uncalled(SkipManager.bypassed)
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
    log_roles(config, roles, tallies, uncalled, job_return.status == JobStatus.COMPLETED)
    if rank_of()[0] == 0:  # what others know is in the records of all
        write_summary(Path(config.hydra.runtime.output_dir), job, tallies, recorded)


def refuse(config: DictConfig, error: Exception) -> NoReturn:
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


def _read_skip(config: DictConfig) -> SkipSettings:
    """The settings of `skip`; none if a job that only records stages uses that key itself."""
    try:
        return read_skip(config)
    except RlskipError:
        if chosen_by(config) or not (record_chosen_by(config) and has_own_key(config)):
            raise
        log.info("rlskip: `skip` is taken for the application's own key, as no option chose it")
        return SkipSettings(HostFacts(config))
