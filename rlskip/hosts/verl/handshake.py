"""How the launcher process and the process that trains find each other.

verl's application is the launcher process: it composes the config and starts a Ray actor, which
trains. Hydra's callback runs in the former, rollouts pass through the latter.

1. Launcher, before the job (:mod:`rlskip.hosts.verl.launcher`): leave a token in each dump_dir.
   :func:`runtime_env`, a hook that ``ray.init`` in verl's main() calls, adds the job's variables. A
   Ray that runs already gets these in its key-value store.
2. Every process that imports verl loads the plug-in, by its entry point. One that trains without it
   reads the config by verl's own ``SkipManager.init``, which does not know the key
   ``skip.provider``, and ends.
3. The process that trains, when the config arrives (:func:`rlskip.hosts.verl.trainer.begin`):
   :func:`find_job`, look for the token, then :func:`acknowledge` each role by a file.
4. Launcher, after the job: restore the environment. A job that was not acknowledged has failed,
   unless a stage called rlskip, or there is no token, because ``dump_dir`` cannot be written.
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
from typing import Any

from rlskip.config.dump_dir import DIRECTORY_VARIABLE
from rlskip.config.origin import ORIGIN_VARIABLE
from rlskip.errors import ConfigError
from rlskip.hosts.verl import names
from rlskip.jobs import records

log = logging.getLogger(__name__)

_TOKEN = "launcher"  # what the token acknowledges in place of a role

SHOWN_S = 90.0
"""Seconds until another node shows a new file: NFS may keep a listing for 60 s."""


def attached_by() -> str | None:
    """The group of the entry point by which verl's processes load rlskip; None if they do not.

    Looks at installed metadata and environment variables only.
    """
    allowed = os.environ.get(names.PLUGINS_VARIABLE, "auto").strip().lower()
    chosen = {name.strip() for name in allowed.split(",")}
    found = importlib.metadata.entry_points(group=names.PLUGIN_GROUP)
    ours = {entry.name for entry in found if entry.value == names.PLUGIN}
    return names.PLUGIN_GROUP if ours and (allowed == "auto" or ours & chosen) else None


# -- from the launcher process to the process that trains ----------------------------------------


def reach_workers() -> None:
    """Have the workers of Ray know the job: of the Ray that it will start, or that runs already."""
    if (ray := running_ray()) is not None:
        from ray.experimental.internal_kv import _internal_kv_put

        # In the store that the whole cluster shares.
        _internal_kv_put(_job_key(ray), json.dumps(_job_variables()).encode())
        return
    hook = f"{__name__}.{runtime_env.__name__}"
    before = os.environ.get(names.RAY_HOOK_VARIABLE)
    if before not in (None, hook):
        os.environ[names.NEXT_HOOK_VARIABLE] = before
    os.environ[names.RAY_HOOK_VARIABLE] = hook


def runtime_env(given: dict[str, Any] | None) -> dict[str, Any]:
    """Ray's hook: the job's runtime environment, with the job's variables.

    Calls the hook that was set before first.
    """
    if (before := os.environ.get(names.NEXT_HOOK_VARIABLE)) is not None:
        module, _, name = before.rpartition(".")
        given = getattr(importlib.import_module(module), name)(given)
    env = dict(given or {})
    return {**env, "env_vars": {**(env.get("env_vars") or {}), **_job_variables()}}


def running_ray() -> Any:
    """The module `ray` once Ray is initialized, else None. Imports nothing."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None


def leave_token(dump_dir: str) -> bool:
    """Write a token of the job, for another process to see that `dump_dir` is the same there.

    False where it cannot be written; then nobody should look.
    """
    try:
        records.acknowledge(dump_dir, _TOKEN)
    except OSError:
        return False
    return True


def refuse_unshared(key: str, dump_dir: str, job: str, who: str = _TOKEN) -> None:
    """Raise :class:`ConfigError` naming `key` unless `job`'s token is in `dump_dir` here, too."""
    deadline = time.monotonic() + SHOWN_S
    while not records.acknowledged(dump_dir, who, job):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"it is not shared: on {socket.gethostname()} {dump_dir} is another directory than "
                "in the process that started this one",
                key,
                "name a directory that all nodes share: skip.dump_dir=/shared/dumps",
            )
        time.sleep(0.1)


# -- in the process that trains, and back --------------------------------------------------------


def find_job() -> None:
    """In the process that trains: take the job's variables from Ray where they are published."""
    if (ray := running_ray()) is None:
        return
    from ray.experimental.internal_kv import _internal_kv_get

    if (published := _internal_kv_get(_job_key(ray))) is not None:
        os.environ.update(json.loads(published))


def acknowledge(role: str, dump_dir: str) -> None:
    """In the process that trains: record below `dump_dir` that `role` is on.

    Raises ConfigError where it is not the launcher process's `dump_dir`, or only that process can
    write there, so that it would not know.
    """
    key = f"skip.{role}.dump_dir"
    if has_token := names.TOKEN_VARIABLE in os.environ:
        refuse_unshared(key, dump_dir, records.job_id())
    try:
        records.acknowledge(dump_dir, role, by=attached_by())
    except OSError as failed:
        if has_token:
            raise ConfigError(
                f"the launcher process can write there, and this one cannot: {failed}",
                f"{key}={dump_dir}",
                "name a directory that can be written",
            ) from failed
        # Dumps can still be read there. Each one that cannot be written costs a warning.
        log.warning("rlskip: %s cannot be written: %s", dump_dir, failed)


# -- details ---------------------------------------------------------------------------------


def _job_variables() -> dict[str, str]:
    ours = (records.JOB_VARIABLE, DIRECTORY_VARIABLE, ORIGIN_VARIABLE, names.TOKEN_VARIABLE)
    return {name: os.environ[name] for name in ours if name in os.environ}


def _job_key(ray: Any) -> bytes:
    return f"rlskip/{ray.get_runtime_context().get_job_id()}/job".encode()
