"""The Hydra callback: installs SkipManager when a job starts, sums up when it ends.

Hydra turns an `Exception` of a callback into a warning and runs the task all the same, so a
job that cannot be honoured is ended by :class:`RlskipAbort`, and behind it a SkipManager that
refuses is left in place. Launchers send a pickled copy of the callback to their workers
without calling `__init__`: everything is read from `config`, nothing is kept between jobs.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.utils import JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from rlskip.config.legacy import legacy_flags, refuse_legacy_flags, retire_legacy_flags
from rlskip.config.skip import DIRECTORY_VARIABLE, RoleConfig, read_roles
from rlskip.errors import RlskipAbort, RlskipError
from rlskip.hosts import verl_job
from rlskip.hosts.attach import install, uninstall
from rlskip.skip.base import BaseSkip
from rlskip.skip.manager import SkipManager
from rlskip.skip.records import JOB_VARIABLE, Tally, new_job_id, tally

log = logging.getLogger(__name__)

SUMMARY = "rlskip_summary.json"


class SkipCallback(Callback):
    """Switched on by every `+skip=...` option; the key is ``hydra.callbacks.rlskip``."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """In a single run this very object reaches the task: turn legacy flags off in it."""
        if legacy_flags(config) and "rollout" in _roles_or_none(config):
            retire_legacy_flags(config, rollout_enabled=True)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._multirun_began = time.time()

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Install SkipManager, or end the job."""
        try:
            os.environ[JOB_VARIABLE] = new_job_id()
            os.environ[DIRECTORY_VARIABLE] = config.hydra.runtime.cwd
            if legacy_flags(config) and "rollout" in _roles_or_none(config):
                # What is changed from here on, the task does not see.
                refuse_legacy_flags(config)
            install(config, flush_at_end=True)
            if SkipManager.skip_instances:
                verl_job.before_job(config, _dump_dirs(SkipManager.skip_instances))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            SkipManager.refuse(reason)
            unexpected = not isinstance(error, RlskipError)
            log.error("rlskip ends this job before it starts.\n%s", reason, exc_info=unexpected)
            if config.hydra.mode == RunMode.RUN:
                # Short, and seen even where logging is off.
                raise SystemExit(f"rlskip: {reason}") from error
            # Ray's launcher loses the message of a SystemExit and retries the job.
            raise RlskipAbort(reason) from error
        if not SkipManager.skip_instances:
            log.warning(
                "rlskip: NOTHING is skipped or cached in this job: skip.enable is false, or no "
                "role under skip is enabled (an entry after `skip: ...` in a defaults list may "
                "have turned it off again)"
            )

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        """One line a role, and ``rlskip_summary.json`` in the job's output directory."""
        try:
            SkipManager.flush()
        except Exception:
            log.exception("rlskip: the last dumps are not on disk")
        roles = dict(SkipManager.skip_instances)
        unwritten = {role: SkipManager.unwritten(role) for role in roles}
        uninstall()
        job = os.environ.pop(JOB_VARIABLE, "")
        os.environ.pop(DIRECTORY_VARIABLE, None)
        if not roles:
            return
        tallies = {
            role: counts + unwritten[role] for role, counts in tally(_dump_dirs(roles), job).items()
        }
        verl_job.after_job(
            job_return,
            consulted=any(counts.consulted for counts in tallies.values()),
            one_of_many=config.hydra.get("mode") == RunMode.MULTIRUN,
        )
        for role, counts in tallies.items():
            if counts.consulted:
                log.info("rlskip: role %s: %s", role, counts)
            elif job_return.status == JobStatus.COMPLETED:
                log.warning(
                    "rlskip: role %s is enabled and was NEVER CONSULTED: nothing called a function "
                    "decorated with it, so nothing was skipped or cached in this job. Is it the "
                    "right role for this trainer?",
                    role,
                )
        _write_summary(Path(config.hydra.runtime.output_dir), job, tallies)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """One table over the jobs of the sweep."""
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
        lines = [f"{'job':<12}{'role':<16}{'hits':>6}{'misses':>8}{'saved s':>10}"]
        # Shorter first: job 10 comes after job 2.
        for job, role, counts in sorted(rows, key=lambda row: (len(row[0]), row[0], row[1])):
            lines.append(
                f"{job:<12}{role:<16}{counts['hits']:>6}{counts['misses']:>8}"
                f"{round(counts['seconds_saved'], 1) + 0.0:>10.1f}"  # never -0.0
            )
        log.info("rlskip, over the jobs of this sweep:\n%s", "\n".join(lines))


def _roles_or_none(config: DictConfig) -> dict[str, RoleConfig]:
    """The enabled roles; none where the config is bad, which on_job_start will tell."""
    from rlskip.skip.base import role_specs

    try:
        import rlskip.skip.roles  # noqa: F401 - registers the built-in roles

        return read_roles(config, role_specs())
    except RlskipError:
        return {}


def _dump_dirs(roles: Mapping[str, BaseSkip]) -> dict[str, str]:
    return {role: skip.local_config.dump_dir for role, skip in roles.items()}


def _write_summary(output_dir: Path, job: str, tallies: dict[str, Tally]) -> None:
    import attrs

    summary = {
        "job": job,
        "written": time.time(),
        "roles": {role: attrs.asdict(counts) for role, counts in tallies.items()},
    }
    try:
        (output_dir / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        log.warning("rlskip: %s could not be written: %s", output_dir / SUMMARY, error)
