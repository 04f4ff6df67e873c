"""The launcher process's side of the handshake (see :mod:`rlskip.hosts.verl.handshake`)."""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from hydra.core.utils import JobStatus

from rlskip._compat import version_of
from rlskip.config.check import raise_all
from rlskip.config.settings import SkipSettings
from rlskip.errors import NotInstalledError
from rlskip.hosts.verl import names
from rlskip.hosts.verl.facts import (
    SUPPORTED,
    is_old_release,
    is_verls,
    refuse_old_release,
    verl_release,
)
from rlskip.hosts.verl.handshake import leave_token, reach_workers, running_ray
from rlskip.hosts.verl.trainer_config import judge
from rlskip.jobs.records import FOLDER, JOB_VARIABLE, acknowledged
from rlskip.skip.manager import SkipManager

log = logging.getLogger(__name__)

_CHANGED = (names.RAY_HOOK_VARIABLE, names.NEXT_HOOK_VARIABLE, names.TOKEN_VARIABLE)


class _Job:
    """The job under way: the environment to restore, the acknowledgement to look for."""

    def __init__(self, dump_dirs: Mapping[str, str]) -> None:
        self.found_ray = running_ray() is not None
        self._name = os.environ[JOB_VARIABLE]
        self._dump_dirs = dict(dump_dirs)
        self._environ = {name: os.environ.get(name) for name in _CHANGED}
        self._shares = all(map(leave_token, set(dump_dirs.values())))
        if self._shares:  # else neither process must look for what the other cannot write
            os.environ[names.TOKEN_VARIABLE] = "1"

    def failure(self, error: BaseException | None) -> NotInstalledError | None:
        """What the job failed of that it does not say itself; None where that is nothing.

        `error` is what its task raised.
        """
        asked = self._dump_dirs.items() if error is None and self._shares else ()
        if asked and not any(acknowledged(folder, role, self._name) for role, folder in asked):
            folders = {f"{dump_dir}/{FOLDER}/{self._name}" for _, dump_dir in asked}
            return NotInstalledError(
                "skip is on, and no process of this job acknowledged it: nothing was skipped or "
                "cached",
                ", ".join(sorted(folders)),
                "either rlskip does not know this trainer, or its process does not load rlskip "
                "(`rlskip doctor` reports what is active here)",
            )
        # verl's own skip manager does not know that key of the options.
        if error is not None and all(word in str(error) for word in ("provider", "SkipManager")):
            return NotInstalledError(
                "the process that trains did not load rlskip's plug-in, and verl's own skip "
                "manager does not know 'provider'",
                "skip.provider",
                "install rlskip on every node",
            )
        return None

    def end(self) -> None:
        for name, value in self._environ.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_job: _Job | None = None


def starts_verl(settings: SkipSettings) -> bool:
    """Whether the application is one of verl's, which trains in another process.

    A program of the user's own with an old verl, where every role is attached, trains in this one.
    """
    if "verl" not in sys.modules or not is_verls(settings.facts.config):
        return False
    is_verls_own = (_main_module() or "").startswith("verl.")
    attached = settings.roles.keys() <= settings.attach.keys()
    return is_verls_own or not (is_old_release() and attached)


def before_job(settings: SkipSettings) -> None:
    """Prepare a job of verl, or refuse one that would not skip; leave other applications alone."""
    global _job
    if not starts_verl(settings):
        return
    refuse_old_release()
    if (version_of("verl") or (0,))[: len(SUPPORTED)] > SUPPORTED:
        log.warning(
            "rlskip: verl %s is newer than 0.9, the newest that was tested: it is tried, and a "
            "seam that has changed ends the run",
            verl_release(),
        )
    _check_plugin()
    judge(copy.deepcopy(settings.facts.config), settings, _main_module())
    from rlskip.hosts.verl.preflight import problems  # torch is not for every application

    raise_all(problems(settings, SkipManager.skip_instances))
    job = _Job({role: str(local.dump_dir) for role, local in settings.roles.items()})
    reach_workers()
    _job = job


def after_job(job_return: Any, consulted: bool, one_of_many: bool) -> None:
    """Fail a completed job that no process acknowledged, and say of a failed one what it lacked.

    Parameters
    ----------
    job_return
        Hydra's JobReturn, changed in place.
    consulted
        Whether a stage of the job called rlskip, in any process.
    one_of_many
        Whether this process may run further jobs of a sweep. Then shut down the Ray that verl
        started for this one: its actors hold the GPUs that verl's next job needs.
    """
    global _job
    job, _job = _job, None
    if job is None:
        return
    job.end()
    completed = job_return.status == JobStatus.COMPLETED
    raised = None if completed else job_return._return_value
    if not (completed and consulted) and (error := job.failure(raised)) is not None:
        error.__cause__ = raised
        job_return.status = JobStatus.FAILED
        job_return.return_value = error
    if one_of_many and not job.found_ray and (ray := running_ray()) is not None:
        ray.shutdown()


def _check_plugin() -> None:
    """Raise NotInstalledError unless verl has loaded the plug-in in this process."""
    if names.PLUGIN not in sys.modules:
        raise NotInstalledError(
            f"verl has not loaded rlskip's plug-in (entry point {names.PLUGIN_GROUP})",
            f"{names.PLUGINS_VARIABLE}={os.environ.get(names.PLUGINS_VARIABLE, 'auto')}",
            f"unset {names.PLUGINS_VARIABLE} or add rlskip to it; if it is not set, see the reason "
            f'with: python -c "import verl, {names.PLUGIN}", or reinstall rlskip',
        )


def _main_module() -> str | None:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec.name if spec is not None else None
