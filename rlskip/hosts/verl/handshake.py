"""How the launcher process and the process that trains find each other.

verl's application is the launcher process: it composes the config and starts a Ray actor, which
trains. Hydra's callback runs in the former, rollouts pass through the latter.

1. Launcher, before the job (:func:`rlskip.hosts.verl.launcher.before_job`): refuse a release, a
   trainer or a config that rlskip does not support. Nothing has been started yet.
2. Launcher, where no Ray runs (:func:`reach_next_ray`): name the plug-in in
   ``VERL_USE_EXTERNAL_MODULES``, and :func:`runtime_env` in ``RAY_RUNTIME_ENV_HOOK``.
   Where Ray runs already (:func:`reach_running_ray`): ask each of its nodes whether its workers
   load the plug-in, and publish the job's variables in Ray's key-value store.
3. ``ray.init`` in verl's main() calls the hook. It adds the plug-in and the job's variables
   (``RLSKIP_JOB``, ``RLSKIP_DIRECTORY``) to the runtime environment, which reaches every node.
4. Every process that imports verl loads the plug-in, by the entry point ``verl.plugins`` or by the
   variable. :mod:`~rlskip.hosts.verl.plugin` wraps the seams. A node without rlskip fails at this
   import, because of the variable.
5. The process that trains, when the config arrives (:func:`rlskip.hosts.verl.trainer.begin`):
   :func:`find_job`, switch the roles on, then :func:`acknowledge` each of them, by a file below
   ``dump_dir`` and by a key in Ray.
6. Launcher, during the job: a thread waits ``RLSKIP_ATTACH_TIMEOUT_S`` seconds for an
   acknowledgement. It ends the run when that time is over, as soon as a node of the Ray that
   the job started turns out not to load the plug-in, or when Ray has an acknowledgement whose
   file is not in this process's ``dump_dir`` (:func:`unshared`).
7. Launcher, after the job (:func:`rlskip.hosts.verl.launcher.after_job`): restore the
   environment. A job that was not acknowledged has failed, unless a stage called rlskip in the
   launcher process itself.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlskip.config.dump_dir import DIRECTORY_VARIABLE
from rlskip.config.origin import ORIGIN_VARIABLE
from rlskip.errors import ConfigError, NotInstalledError
from rlskip.hosts.verl.names import (
    MODULES_VARIABLE,
    NEXT_HOOK_VARIABLE,
    PLUGIN,
    PLUGIN_GROUP,
    PLUGINS_VARIABLE,
    RAY_HOOK_VARIABLE,
)
from rlskip.jobs import records
from rlskip.jobs.nodes import Unanswered, answers, ask_nodes

log = logging.getLogger(__name__)

_JOB_KEY = "job"
PROBE_S = 120.0
"""Seconds that a node may take to answer."""

SHOWN_S = 90.0
"""Seconds until another node shows a new file: NFS may keep a listing for 60 s."""


# -- how verl loads the plug-in ------------------------------------------------------------------


def attached_by() -> str | None:
    """How the verl processes of this environment load rlskip; None if they do not.

    ``verl.plugins`` (the entry point) or ``VERL_USE_EXTERNAL_MODULES``, which counts also where
    ``VERL_USE_EXTERNAL_PLUGINS`` leaves out the entry point. Looks at installed metadata and
    environment variables only.
    """
    allowed = os.environ.get(PLUGINS_VARIABLE, "auto").strip().lower()
    names = {name.strip() for name in allowed.split(",")}
    ours = [e for e in importlib.metadata.entry_points(group=PLUGIN_GROUP) if e.value == PLUGIN]
    if any(allowed == "auto" or e.name in names for e in ours):
        return PLUGIN_GROUP
    return MODULES_VARIABLE if PLUGIN in os.environ.get(MODULES_VARIABLE, "").split(",") else None


# -- from the launcher process into Ray's workers ------------------------------------------------


def reach_next_ray() -> None:
    """Have the workers of the Ray that this job will start load the plug-in and know the job."""
    os.environ[MODULES_VARIABLE] = _with_plugin(os.environ.get(MODULES_VARIABLE, ""))
    hook = f"{__name__}.{runtime_env.__name__}"
    before = os.environ.get(RAY_HOOK_VARIABLE)
    if before not in (None, hook):
        os.environ[NEXT_HOOK_VARIABLE] = before
    os.environ[RAY_HOOK_VARIABLE] = hook


def runtime_env(given: dict[str, Any] | None) -> dict[str, Any]:
    """Ray's hook: the job's runtime environment, with the plug-in and the job's variables.

    Calls the hook that was set before first.
    """
    if (before := os.environ.get(NEXT_HOOK_VARIABLE)) is not None:
        module, _, name = before.rpartition(".")
        given = getattr(importlib.import_module(module), name)(given)
    env = dict(given or {})
    variables = dict(env.get("env_vars") or {})
    modules = variables.get(MODULES_VARIABLE, os.environ.get(MODULES_VARIABLE, ""))
    env["env_vars"] = {**variables, **_job_variables(), MODULES_VARIABLE: _with_plugin(modules)}
    return env


def reach_running_ray(ray: Any) -> None:
    """Publish the job in a Ray that runs already, started by the user or by an earlier job.

    Raises
    ------
    NotInstalledError
        Some node's workers do not load the plug-in, and what they load cannot be changed any more.
    """
    unreached = unreached_nodes(answers(ray, ask_nodes(ray, attached_by), PROBE_S))
    if unreached:
        raise plugin_not_loaded("Ray was started before this job", unreached)
    _put(_JOB_KEY, json.dumps(_job_variables()))


def unreached_nodes(by_node: Mapping[str, Any]) -> list[str]:
    """The nodes whose workers do not load the plug-in, by what :func:`attached_by` answered there.

    A node that gives no answer may be about to leave; one that cannot import rlskip is unreached.
    """
    return [
        node
        for node, way in by_node.items()
        if way is None or (isinstance(way, Unanswered) and way.lacks_rlskip)
    ]


def plugin_not_loaded(which_ray: str, nodes: Sequence[str]) -> NotInstalledError:
    return NotInstalledError(
        f"{which_ray}, and its workers do not load rlskip's plug-in on {', '.join(nodes)}",
        MODULES_VARIABLE,
        f"start Ray with {MODULES_VARIABLE}={PLUGIN} in its environment, or let verl start Ray",
    )


def running_ray() -> Any:
    """The module `ray` once Ray is initialized, else None. Imports nothing."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None


# -- from the process that trains back to the launcher -------------------------------------------


def find_job() -> None:
    """In the process that trains: take the job's variables from Ray where they are published."""
    published = _get(_JOB_KEY)
    if published is not None:
        os.environ.update(json.loads(published))


def acknowledge(role: str, dump_dir: str) -> None:
    """In the process that trains: record below `dump_dir` and in Ray that `role` is on.

    Raises
    ------
    ConfigError
        Neither is possible, so the launcher process would end the run.
    """
    failed = None
    try:
        records.acknowledge(dump_dir, role, host="verl", by=attached_by())
    except OSError as error:
        failed = error
    facts = {"dump_dir": str(dump_dir), "host": socket.gethostname(), "written": failed is None}
    in_ray = _put(f"{records.job_id()}/{role}", json.dumps(facts))
    if failed is None:
        return
    if not in_ray:
        raise ConfigError(
            f"the acknowledgement cannot be written, nor sent, as Ray is not running: {failed}",
            f"skip.{role}.dump_dir={dump_dir}",
            "name a directory that can be written",
        ) from failed
    # Dumps can still be read there. Each one that cannot be written costs a warning.
    log.warning("rlskip: %s cannot be written: %s", dump_dir, failed)


def is_acknowledged(job: str, dump_dirs: Mapping[str, str]) -> bool:
    """In the launcher process: whether any role of `job` is acknowledged.

    `dump_dirs` holds the ``dump_dir`` of each enabled role.
    """
    return any(
        _get(f"{job}/{role}") is not None or records.acknowledged(dump_dir, role, job)
        for role, dump_dir in dump_dirs.items()
    )


def unshared(job: str, dump_dirs: Mapping[str, str]) -> ConfigError | None:
    """In the launcher process: the error of a dump_dir that is another one where the job trains.

    There the process that trains has written an acknowledgement that cannot be seen here.
    """
    deadline = time.monotonic() + SHOWN_S
    for role, dump_dir in dump_dirs.items():
        value = _get(f"{job}/{role}")
        there = json.loads(value) if value is not None else {"written": False}
        while there["written"] and not records.acknowledged(dump_dir, role, job):
            if time.monotonic() > deadline:
                return ConfigError(
                    f"it is not shared: the process that trains, on {there['host']}, has its dumps "
                    f"in {there['dump_dir']}, and {dump_dir} on {socket.gethostname()} is another "
                    "directory",
                    f"skip.{role}.dump_dir",
                    "name a directory that all nodes share: skip.dump_dir=/shared/dumps",
                )
            time.sleep(0.1)
    return None


# -- details ---------------------------------------------------------------------------------


def _job_variables() -> dict[str, str]:
    names = (records.JOB_VARIABLE, DIRECTORY_VARIABLE, ORIGIN_VARIABLE)
    return {name: os.environ[name] for name in names if name in os.environ}


def _with_plugin(modules: str) -> str:
    names = [name for name in modules.split(",") if name]
    return ",".join(names if PLUGIN in names else [*names, PLUGIN])


def _put(key: str, value: str) -> bool:
    """Store in Ray's key-value store, which the whole cluster shares; False without Ray."""
    if (ray := running_ray()) is None:
        return False
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(_key(ray, key), value.encode())
    return True


def _get(key: str) -> str | None:
    if (ray := running_ray()) is None:
        return None
    from ray.experimental.internal_kv import _internal_kv_get

    value = _internal_kv_get(_key(ray, key))
    return None if value is None else value.decode()


def _key(ray: Any, key: str) -> bytes:
    return f"rlskip/{ray.get_runtime_context().get_job_id()}/{key}".encode()
