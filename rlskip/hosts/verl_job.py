"""verl, in the process that starts a job: its trainer is an actor in another process.

Before the job: refuse what cannot be honoured, and see to it that the plug-in and the job's
name reach that process. verl calls ``ray.init`` in the application's main(), so they travel in
Ray's ``runtime_env``, to other nodes too, put there by Ray's own hook for it. A process that
imports verl and lacks rlskip then fails at this import. A worker is asked: before the job where
Ray runs already, else once the job has started it. During the job: a finite wait for the
trainer's word that it acts. After it: without that word the job has failed.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from hydra.core.utils import JobStatus

from rlskip._compat import version_of
from rlskip.config.check import raise_all
from rlskip.config.skip import DIRECTORY_VARIABLE, look_up
from rlskip.errors import ConfigError, NotInstalledError
from rlskip.hosts.verl import MODULES_VARIABLE, PLUGIN, PLUGINS_VARIABLE, attached_by
from rlskip.skip.records import FOLDER, JOB_VARIABLE, acknowledged, job_id

log = logging.getLogger(__name__)

#: Seconds to wait for the trainer's word, counted from the job's start: models are loaded first.
WAIT_VARIABLE = "RLSKIP_ATTACH_TIMEOUT_S"
WAIT_S = 3600.0

_RAY_HOOK = "RAY_RUNTIME_ENV_HOOK"
_NEXT_HOOK = "RLSKIP_NEXT_RUNTIME_ENV_HOOK"
_CHANGED = (MODULES_VARIABLE, _RAY_HOOK, _NEXT_HOOK)
_PROBE_S = 120.0

#: The oldest release that was tried.
OLDEST = (0, 8)

MAIN_PPO_SYNC = "verl.trainer.main_ppo_sync"


class _Job:
    """A job under way that this process started: what it set, what it waits for."""

    def __init__(self, dump_dirs: Mapping[str, str]) -> None:
        self.found_ray = _ray() is not None
        self._name = os.environ[JOB_VARIABLE]
        self._dump_dirs = dict(dump_dirs)
        self._heard = False
        self._reached = self.found_ray  # then it was asked before the job
        self._asked: Any = None  # the answer of a worker, which may take its time
        self._over = threading.Event()
        self._environ = {name: os.environ.get(name) for name in _CHANGED}

    def acknowledged(self) -> bool:
        """Whether some process said that it acts: by a file or, on another disk, through Ray.

        Once heard it holds: Ray, and its table, may be gone when the job ends.
        """
        self._heard = (
            self._heard
            or _kv_get(self._name) is not None
            or any(acknowledged(d, role, self._name) for role, d in self._dump_dirs.items())
        )
        return self._heard

    def complaint(self) -> NotInstalledError:
        folders = {f"{dump_dir}/{FOLDER}/{self._name}" for dump_dir in self._dump_dirs.values()}
        return NotInstalledError(
            "skip is on, and no process of this job said that it acts: nothing was skipped or "
            "cached",
            ", ".join(sorted(folders)),
            "either this trainer is none that rlskip knows, or its process does not load rlskip "
            "(`rlskip doctor` tells what is active here)",
        )

    def watch(self, wait_s: float) -> None:
        """End the run once `wait_s` seconds have passed without a word.

        At once where none can come: a worker of the Ray that the job started lacks the plug-in.
        """

        def wait() -> None:
            until = time.monotonic() + wait_s
            while not self._over.wait(min(2.0, max(0.0, until - time.monotonic()))):
                if self.acknowledged():
                    return
                if self._is_unreached():
                    _end_run("rlskip ends this run: %s", _unloaded("The Ray of this job is up"))
                    return
                if time.monotonic() >= until:
                    _end_run(
                        "rlskip ends this run after %g s (%s): %s",
                        wait_s, WAIT_VARIABLE, self.complaint(),
                    )  # fmt: skip
                    return

        threading.Thread(target=wait, name="rlskip-verl", daemon=True).start()

    def _is_unreached(self) -> bool:
        """Whether a worker says that the plug-in did not get into the job's own Ray."""
        if self._reached or (ray := _ray()) is None:
            return False
        try:
            if self._asked is None:
                self._asked = _ask_worker(ray)
            if not ray.wait([self._asked], timeout=0)[0]:
                return False
            self._reached = ray.get(self._asked) is not None
        except Exception as error:  # no verdict; a node without rlskip fails when verl is imported
            log.debug("rlskip: no worker could be asked: %s", error)
            self._reached = True
        return not self._reached

    def end(self) -> None:
        self._over.set()
        for name, value in self._environ.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _end_run(message: str, *facts: Any) -> None:
    log.error(message, *facts)
    main = threading.main_thread().ident
    assert main is not None
    # SIGINT gets out of a blocking call, too, and lets the job end as by Ctrl-C. What a script
    # starts with `&` ignores it.
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.pthread_kill(main, signal.SIGTERM if ignored else signal.SIGINT)


_job: _Job | None = None


def is_verls(config: Any) -> bool:
    """Whether it looks like the config of one of verl's applications."""
    parts = ("actor_rollout_ref", "ray_kwargs", "trainer")
    return all(look_up(config, part) is not None for part in parts)


def starts_verl(config: Any) -> bool:
    """Whether the application is one of verl's: its trainer then runs in a Ray actor."""
    return "verl" in sys.modules and is_verls(config)


def before_job(config: Any, dump_dirs: Mapping[str, str]) -> None:
    """Prepare a job of verl whose config enables the roles in `dump_dirs`.

    Does nothing where the application is none of verl's.

    Raises
    ------
    ConfigError
        The config, or the trainer, is none that rlskip can honour.
    NotInstalledError
        rlskip would not get into the process that trains.
    """
    global _job
    if not starts_verl(config):
        return
    refuse_release()
    if MAIN_PPO_SYNC in sys.modules or _main() == MAIN_PPO_SYNC:
        refuse_main_ppo_sync()
    if verl_version() >= (0, 9):
        _refuse_unattached()
    judge(config)
    job = _Job(dump_dirs)
    if job.found_ray:
        _reach_running(_ray())
    else:
        _reach_next()
    job.watch(float(os.environ.get(WAIT_VARIABLE, WAIT_S)))
    _job = job


def after_job(job_return: Any, consulted: bool, one_of_many: bool) -> None:
    """Fail a job that completed and of which nobody said that rlskip acts.

    Parameters
    ----------
    job_return
        Hydra's; changed in place.
    consulted
        Whether any stage of it asked rlskip, in whatever process.
    one_of_many
        Whether this process may run further jobs of a sweep. The Ray that verl started for this
        one is then shut down: its actors hold the GPUs, and verl's next job would find none.
    """
    global _job
    job, _job = _job, None
    if job is None:
        return
    job.end()
    if job_return.status == JobStatus.COMPLETED and not consulted and not job.acknowledged():
        job_return.status = JobStatus.FAILED
        job_return.return_value = job.complaint()
    if one_of_many and not job.found_ray and (ray := _ray()) is not None:
        ray.shutdown()


def verl_version() -> tuple[int, ...]:
    return version_of("verl") or (0,)


def refuse_release() -> None:
    """Raise :class:`ConfigError` on a verl that is older than those that were tried."""
    if verl_version() < OLDEST:
        raise ConfigError(
            f"verl {_said(verl_version())} is not supported, and would train without skipping",
            "skip",
            f"use verl {_said(OLDEST)} or later, or turn skip off",
        )


def refuse_main_ppo_sync() -> NoReturn:
    raise ConfigError(
        "verl's main_ppo_sync is not supported, and would train without skipping",
        "skip",
        "use verl.trainer.main_ppo; or verl 0.9's V1 trainer with +skip=rollout_tq_cache",
    )


def _said(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _refuse_unattached() -> None:
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


def judge(config: Any) -> None:
    """Refuse, before any GPU is taken, what the trainer would refuse or never ask for.

    Raises
    ------
    ConfigError
        Names *every* problem of the roles that are on with the trainer that `config` chooses.
    """
    from rlskip.hosts.verl_v1 import foreign_roles, prepare

    if look_up(config, "trainer.use_v1") or look_up(config, "async_training") is not None:
        prepare(copy.deepcopy(config))
    else:
        raise_all(foreign_roles(config, "rollout"))


def _main() -> str | None:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec.name if spec is not None else None


# -- into the other process --------------------------------------------------------------


def _reach_next() -> None:
    """Ray is yet to be started: have its workers load the plug-in and know the job."""
    os.environ[MODULES_VARIABLE] = _with_plugin(os.environ.get(MODULES_VARIABLE, ""))
    hook = f"{__name__}.runtime_env"
    before = os.environ.get(_RAY_HOOK)
    if before not in (None, hook):
        os.environ[_NEXT_HOOK] = before
    os.environ[_RAY_HOOK] = hook


def runtime_env(given: dict[str, Any] | None) -> dict[str, Any]:
    """Ray's hook: the runtime environment of the job, with the plug-in and the job's name.

    A hook that was set before is called first.
    """
    before = os.environ.get(_NEXT_HOOK)
    if before is not None:
        given = _load(before)(given)
    env = dict(given or {})
    variables = dict(env.get("env_vars") or {})
    modules = variables.get(MODULES_VARIABLE, os.environ.get(MODULES_VARIABLE, ""))
    env["env_vars"] = {**variables, **_job_variables(), MODULES_VARIABLE: _with_plugin(modules)}
    return env


def _reach_running(ray: Any) -> None:
    """Ray runs already, started by a job before or by the user: its workers are as they are."""
    if ray.get(_ask_worker(ray), timeout=_PROBE_S) is None:
        raise _unloaded("Ray was started before this job")
    _kv_put("job", json.dumps(_job_variables()))


def _ask_worker(ray: Any) -> Any:
    """The way by which a worker loads rlskip, to be had of Ray; in a process of its own."""
    return ray.remote(num_cpus=0, max_calls=1)(attached_by).remote()


def _unloaded(which: str) -> NotInstalledError:
    return NotInstalledError(
        f"{which}, and its workers do not load rlskip's plug-in",
        MODULES_VARIABLE,
        f"start Ray with {MODULES_VARIABLE}={PLUGIN} in its environment (`rlskip doctor --ray` "
        "asks every node), or leave starting it to verl",
    )


def find_job() -> None:
    """In the process that trains: the job's name, where only Ray knows it."""
    said = _kv_get("job")
    if said is not None:
        os.environ.update(json.loads(said))


def leave_word(role: str) -> bool:
    """In the process that trains: say through Ray that it acts; False where there is no Ray."""
    return _kv_put(job_id(), role)


def _job_variables() -> dict[str, str]:
    names = (JOB_VARIABLE, DIRECTORY_VARIABLE)
    return {name: os.environ[name] for name in names if name in os.environ}


def _ray() -> Any:
    """The module, once Ray is started."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None


def _kv_put(key: str, value: str) -> bool:
    """Into Ray's own table, which every process of the cluster sees; False where there is none."""
    if (ray := _ray()) is None:
        return False
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(_kv_key(ray, key), value.encode())
    return True


def _kv_get(key: str) -> str | None:
    if (ray := _ray()) is None:
        return None
    from ray.experimental.internal_kv import _internal_kv_get

    said = _internal_kv_get(_kv_key(ray, key))
    return None if said is None else said.decode()


def _kv_key(ray: Any, key: str) -> bytes:
    return f"rlskip/{ray.get_runtime_context().get_job_id()}/{key}".encode()


def _with_plugin(modules: str) -> str:
    named = [name for name in modules.split(",") if name]
    return ",".join(named if PLUGIN in named else [*named, PLUGIN])


def _load(dotted: str) -> Callable[..., Any]:
    import importlib

    module, _, name = dotted.rpartition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function
