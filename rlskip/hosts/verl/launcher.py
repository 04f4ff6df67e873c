"""The launcher process's side of the handshake (see :mod:`rlskip.hosts.verl.handshake`)."""

from __future__ import annotations

import copy
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from hydra.core.utils import JobStatus

from rlskip.config.settings import SkipSettings
from rlskip.errors import ConfigError, NotInstalledError, RlskipError
from rlskip.hosts.verl.handshake import (
    attached_by,
    is_acknowledged,
    plugin_not_loaded,
    reach_next_ray,
    reach_running_ray,
    running_ray,
    unreached_nodes,
    unshared,
)
from rlskip.hosts.verl.names import (
    MODULES_VARIABLE,
    NEXT_HOOK_VARIABLE,
    PLUGIN,
    PLUGINS_VARIABLE,
    RAY_HOOK_VARIABLE,
    WAIT_VARIABLE,
)
from rlskip.hosts.verl.supported_versions import (
    is_old_release,
    is_verls,
    refuse_old_release,
    warn_of_new_release,
)
from rlskip.hosts.verl.trainer_config import judge
from rlskip.jobs.nodes import Unanswered, answers, ask_nodes
from rlskip.jobs.records import FOLDER, JOB_VARIABLE

log = logging.getLogger(__name__)

_WAIT_S = 3600.0
_POLL_S = 2.0
_CHANGED = (MODULES_VARIABLE, RAY_HOOK_VARIABLE, NEXT_HOOK_VARIABLE)


class _Job:
    """The job under way: the environment to restore, the acknowledgement to wait for."""

    def __init__(self, dump_dirs: Mapping[str, str]) -> None:
        self.found_ray = running_ray() is not None
        self._name = os.environ[JOB_VARIABLE]
        self._dump_dirs = dict(dump_dirs)
        self._acknowledged = False
        self._reached = self.found_ray  # then the nodes were asked before the job
        self._asked: dict[str, Any] = {}  # the references to the nodes' answers
        self._ended = threading.Event()
        self._environ = {name: os.environ.get(name) for name in _CHANGED}

    def is_acknowledged(self) -> bool:
        """Whether a process has acknowledged a role of this job.

        Once true it stays true: Ray and its key-value store may be gone when the job ends.
        """
        self._acknowledged |= is_acknowledged(self._name, self._dump_dirs)
        return self._acknowledged

    def not_acknowledged(self) -> NotInstalledError:
        folders = {f"{dump_dir}/{FOLDER}/{self._name}" for dump_dir in self._dump_dirs.values()}
        return NotInstalledError(
            "skip is on, and no process of this job acknowledged it: nothing was skipped or cached",
            ", ".join(sorted(folders)),
            "either rlskip does not know this trainer, or its process does not load rlskip "
            "(`rlskip doctor` reports what is active here)",
        )

    def watch(self, wait_s: float) -> None:
        """End the run if nothing is acknowledged within `wait_s` seconds.

        End it earlier if a node of the Ray that the job started does not load the plug-in, or if
        the process that trains has its dumps in another directory.
        """

        def wait() -> None:
            deadline = time.monotonic() + wait_s
            while not self._ended.wait(min(_POLL_S, max(0.0, deadline - time.monotonic()))):
                late = time.monotonic() >= deadline
                after = ""
                error: RlskipError | None
                if nodes := self._unreached():
                    error = plugin_not_loaded("The job started Ray", nodes)
                elif self.is_acknowledged() and (late or self._reached or running_ray() is None):
                    error = self.unshared()
                elif late and not self._acknowledged:
                    error = self.not_acknowledged()
                    after = f" after {wait_s:g} s ({WAIT_VARIABLE})"
                else:
                    continue
                if error is not None:
                    _end_run(f"rlskip ends this run{after}: {error}")
                return

        threading.Thread(target=wait, name="rlskip-verl", daemon=True).start()

    def unshared(self) -> ConfigError | None:
        return unshared(self._name, self._dump_dirs)

    def _unreached(self) -> list[str]:
        """The nodes of the job's own Ray that answered that they do not load the plug-in."""
        if self._reached or (ray := running_ray()) is None:
            return []
        try:
            self._asked = self._asked or ask_nodes(ray, attached_by)
            found = answers(ray, self._asked, 0)
        except Exception as error:  # no verdict; a node without rlskip fails when it imports verl
            log.debug("rlskip: no node could be asked: %s", error)
            found = {}
        self._reached = not any(isinstance(a, Unanswered) and a.is_late for a in found.values())
        return unreached_nodes(found)

    def end(self) -> None:
        self._ended.set()
        for name, value in self._environ.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _end_run(message: str) -> None:
    log.error("%s", message)
    main = threading.main_thread().ident
    assert main is not None
    # SIGINT interrupts a blocking call, too, and ends the job as Ctrl-C does. A process that a
    # script starts with `&` ignores SIGINT.
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.pthread_kill(main, signal.SIGTERM if ignored else signal.SIGINT)


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
    """Prepare a job of verl; do nothing for other applications.

    Raises
    ------
    ConfigError
        rlskip does not support this config, trainer or release.
    NotInstalledError
        The process that trains would not load rlskip.
    """
    global _job
    if not starts_verl(settings):
        return
    refuse_old_release()
    warn_of_new_release()
    _check_plugin()
    judge(copy.deepcopy(settings.facts.config), settings, _main_module())
    from rlskip.hosts.verl.preflight import before_ray  # torch is not for every application

    before_ray(settings)
    job = _Job({role: str(local.dump_dir) for role, local in settings.roles.items()})
    if job.found_ray:
        reach_running_ray(running_ray())
    else:
        reach_next_ray()
    job.watch(float(os.environ.get(WAIT_VARIABLE, _WAIT_S)))
    _job = job


def after_job(job_return: Any, consulted: bool, one_of_many: bool) -> None:
    """Fail a completed job that no process acknowledged, or that trained with another dump_dir.

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
    if job_return.status == JobStatus.COMPLETED and not consulted:
        error: RlskipError | None = job.unshared()
        if error is None and not job.is_acknowledged():
            error = job.not_acknowledged()
        if error is not None:
            job_return.status = JobStatus.FAILED
            job_return.return_value = error
    if one_of_many and not job.found_ray and (ray := running_ray()) is not None:
        ray.shutdown()


def _check_plugin() -> None:
    """Raise NotInstalledError unless verl has loaded the plug-in in this process."""
    if attached_by() is None:
        raise NotInstalledError(
            "verl does not load rlskip's plug-in (entry point verl.plugins)",
            f"{PLUGINS_VARIABLE}={os.environ.get(PLUGINS_VARIABLE, 'auto')}",
            f"allow it: unset {PLUGINS_VARIABLE} or add rlskip to it; if it is not set, "
            "reinstall rlskip, whose entry point is missing",
        )
    if PLUGIN not in sys.modules:
        raise NotInstalledError(
            f"{PLUGIN} could not be loaded by verl",
            "skip",
            f'see the reason with: python -c "import verl, {PLUGIN}"',
        )


def _main_module() -> str | None:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec.name if spec is not None else None
