"""How the launcher process and the process that trains, a Ray actor, find each other.

The launcher, :func:`before_job`, leaves a token in each dump_dir, which the process that trains
looks for, and has the job's variables set in each process of Ray. One that has no plug-in reads
the config by verl's own ``SkipManager.init``, which does not know the key ``skip.provider``.
"""

from __future__ import annotations

import copy
import importlib.metadata
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from rlskip._wrap import around, wrap
from rlskip.config.check import raise_all
from rlskip.config.dump_dir import DIRECTORY_VARIABLE
from rlskip.config.facts import ORIGIN_VARIABLE
from rlskip.config.settings import SkipSettings
from rlskip.errors import ConfigError, NotInstalledError
from rlskip.hosts.verl.facts import is_old_release, is_verls, refuse_old_release
from rlskip.jobs.records import JOB_VARIABLE, has_token, leave_token
from rlskip.skip.manager import SkipManager

#: What verl loads in each of its processes, the entry-point group that names it, and verl's
#: variable of the entry points to load.
PLUGIN = "rlskip.hosts.verl.plugin"
PLUGIN_GROUP = "verl.plugins"
PLUGINS_VARIABLE = "VERL_USE_EXTERNAL_PLUGINS"

#: Set where the launcher process left a token in each dump_dir.
TOKEN_VARIABLE = "RLSKIP_TOKEN"

SHOWN_S = 90.0
"""Seconds until another node shows a new file: NFS may keep a listing for 60 s."""

_TOKEN = "launcher"
_TRAVEL = (JOB_VARIABLE, DIRECTORY_VARIABLE, ORIGIN_VARIABLE, TOKEN_VARIABLE)

# Whether a job of verl is under way.
_under_way = False


def attached_by() -> str | None:
    """The group of the entry point by which verl's processes load rlskip; None if they do not."""
    allowed = os.environ.get(PLUGINS_VARIABLE, "auto").strip().lower()
    chosen = {name.strip() for name in allowed.split(",")}
    found = importlib.metadata.entry_points(group=PLUGIN_GROUP)
    ours = {entry.name for entry in found if entry.value == PLUGIN}
    return PLUGIN_GROUP if ours and (allowed == "auto" or ours & chosen) else None


def starts_verl(settings: SkipSettings) -> bool:
    """Whether the application is one of verl's, which trains in another process."""
    if "verl" not in sys.modules or not is_verls(settings.facts.config):
        return False
    # A program of the user's own with an old verl, where every role is attached, trains in this.
    attached = settings.roles.keys() <= settings.attach.keys()
    return not (is_old_release() and attached and not (_main_module() or "").startswith("verl."))


def before_job(settings: SkipSettings) -> None:
    """Prepare a job that starts verl, or refuse one that would not skip."""
    global _under_way
    refuse_old_release()
    if PLUGIN not in sys.modules:
        raise NotInstalledError(
            f"verl has not loaded rlskip's plug-in (entry point {PLUGIN_GROUP})",
            f"{PLUGINS_VARIABLE}={os.environ.get(PLUGINS_VARIABLE, 'auto')}",
            f"unset {PLUGINS_VARIABLE} or add rlskip to it; if it is not set, see the reason "
            f'with: python -c "import verl, {PLUGIN}", or reinstall rlskip',
        )
    if _running_ray() is not None:
        raise ConfigError(
            "Ray runs in this process already, and its actors would not know this job",
            "ray.init",
            "call ray.shutdown() first: verl starts Ray, or joins it, at the start of each job",
        )
    # torch is not for every application
    from rlskip.hosts.verl.no_engine import problems
    from rlskip.hosts.verl.trainer_config import judge

    judge(copy.deepcopy(settings.facts.config), settings, _main_module())
    raise_all(problems(settings, SkipManager.skip_instances))
    # Neither process must look for what the other cannot write.
    if all(leave_token(str(local.dump_dir), _TOKEN) for local in settings.roles.values()):
        os.environ[TOKEN_VARIABLE] = "1"
    _under_way = True
    wrap("ray:init", around(_joining), key=_TOKEN)


def _joining(init: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``ray.init`` of verl's main()."""
    if _under_way:
        given = kwargs.get("runtime_env") or {}
        ours = {name: os.environ[name] for name in _TRAVEL if name in os.environ}
        env_vars = {**(given.get("env_vars") or {}), **ours}
        kwargs["runtime_env"] = {**given, "env_vars": env_vars}
    return init(*args, **kwargs)


def after_job(job_return: Any, one_of_many: bool) -> None:
    """Say of a failed job, in Hydra's `job_return`, if the process that trains lacked the plug-in.

    Before the next of many jobs leave Ray: its actors hold the GPUs that verl needs again.
    """
    from hydra.core.utils import JobStatus

    global _under_way
    if not _under_way:
        return
    _under_way = False
    os.environ.pop(TOKEN_VARIABLE, None)
    raised = None if job_return.status == JobStatus.COMPLETED else job_return._return_value
    # verl's own skip manager does not know that key of the options.
    if all(word in str(raised) for word in ("provider", "SkipManager")):
        what = "the process that trains did not load rlskip's plug-in, and verl's own skip manager "
        remedy = "install rlskip on every node"
        error = NotInstalledError(f"{what}does not know 'provider'", "skip.provider", remedy)
        error.__cause__ = raised
        job_return.return_value = error
    if one_of_many and (ray := _running_ray()) is not None:
        ray.shutdown()


def _running_ray() -> Any:
    """The module `ray` once Ray is initialized, else None. Imports nothing."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None


def _main_module() -> str | None:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec.name if spec is not None else None


def refuse_unshared(key: str, dump_dir: str, job: str, who: str = _TOKEN) -> None:
    """Raise :class:`ConfigError` naming `key` unless `job`'s token is in `dump_dir` here, too."""
    if not has_token(dump_dir, who, job, SHOWN_S):
        raise ConfigError(
            f"it is not shared: on {socket.gethostname()} {dump_dir} is another directory than "
            "in the process that started this one",
            key,
            "name a directory that all nodes share: skip.dump_dir=/shared/dumps",
        )
