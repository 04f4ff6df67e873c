"""verl, in the process that trains: where the config arrives and where rollouts pass.

================================================  ==============================================
``AgentLoopManager.__init__``                     gets the whole config, in every trainer of every
                                                  version from 0.7.1 on: rlskip begins here
``AgentLoopManager.generate_sequences``           role ``rollout``: the V0 trainers' one call a step
``verl.utils.skip.SkipManager`` (0.9)             verl's own manager: ``init`` begins rlskip now,
                                                  and its table of roles stays empty
================================================  ==============================================

The V1 trainer's seams are in :mod:`rlskip.hosts.verl_v1`; what the process that starts a job
does is in :mod:`rlskip.hosts.verl_job`.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import inspect
import logging
import os
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from rlskip.errors import ConfigError, NotInstalledError
from rlskip.hosts.attach import install, when_imported, wrap
from rlskip.skip import SkipManager
from rlskip.skip.records import acknowledge, job_id

log = logging.getLogger(__name__)

#: The module that verl loads in its processes, and the group of the entry point that names it.
PLUGIN = "rlskip.hosts.verl_plugin"
GROUP = "verl.plugins"
MODULES_VARIABLE = "VERL_USE_EXTERNAL_MODULES"
PLUGINS_VARIABLE = "VERL_USE_EXTERNAL_PLUGINS"

_KEY = "rlskip.verl"
_SCORES = "rm_scores"
_AGENT_LOOP = "verl.experimental.agent_loop.agent_loop"

# The config that this process began with.
_begun: Any = None


def attach() -> None:
    """Register the seams; of verl nothing is imported for it."""
    from rlskip.hosts.verl_v1 import attach_v1

    wrap(f"{_AGENT_LOOP}:AgentLoopManager.__init__", _beginning, key=_KEY)
    wrap(f"{_AGENT_LOOP}:AgentLoopManager.generate_sequences", _rollout_stage, key=_KEY)
    when_imported("verl.utils.skip.skip_manager", _take_over)
    attach_v1()


def attached_by() -> str | None:
    """The way by which rlskip gets into the verl processes of this environment; None: none.

    ``verl.plugins`` (the entry point, verl 0.9 and later) or ``VERL_USE_EXTERNAL_MODULES``.
    Looks at what is installed and at the environment's variables only.
    """
    if _entry_point_allowed():
        return GROUP
    return MODULES_VARIABLE if PLUGIN in os.environ.get(MODULES_VARIABLE, "").split(",") else None


def _entry_point_allowed() -> bool:
    from rlskip._compat import version_of

    installed = version_of("verl")
    if installed is None or installed < (0, 9):
        return False
    allowed = os.environ.get(PLUGINS_VARIABLE, "auto").strip().lower()
    names = {name.strip() for name in allowed.split(",")}
    ours = [e for e in importlib.metadata.entry_points(group=GROUP) if e.value == PLUGIN]
    return any(allowed == "auto" or e.name in names for e in ours)


def begin(config: Any) -> None:
    """Switch on, in this process, what the whole `config` of a run enables. Again is harmless.

    Raises
    ------
    ConfigError
        Names every problem of the `skip` node; or the word that this process acts can be left
        neither in ``dump_dir`` nor through Ray.
    """
    global _begun
    if _begun is config:
        return
    from rlskip.hosts.verl_job import find_job, leave_word, refuse_release

    find_job()
    if logging.getLogger("rlskip").level == logging.NOTSET:
        # verl shows warnings only; what was replayed must be seen.
        logging.getLogger("rlskip").setLevel(logging.INFO)
    install(config)
    if SkipManager.skip_instances:
        refuse_release()
    for role, skip in SkipManager.skip_instances.items():
        told = leave_word(role)
        dump_dir = skip.local_config.dump_dir
        try:
            acknowledge(dump_dir, role, host="verl", by=attached_by())
        except OSError as error:
            if not told:
                raise ConfigError(
                    f"nobody can be told that rlskip acts: {error}",
                    f"skip.{role}.dump_dir={dump_dir}",
                    "name a directory that can be written",
                ) from error
            # Told through Ray. Dumps can be read there; each that cannot be written will say so.
            log.warning("rlskip: nothing can be written in %s: %s", dump_dir, error)
        log.info("rlskip: in charge of role %s in process %d, job %s", role, os.getpid(), job_id())
    _begun = config


def next_step(step: int) -> None:
    """As ``SkipManager.set_step``, and whoever is on must have been asked in the step before.

    Raises
    ------
    NotInstalledError
        A role was not: this trainer has no stage for it, or rlskip does not know where.
    """
    before = SkipManager.step
    for role, skip in SkipManager.skip_instances.items():
        if before is None or skip.support_online_step:
            continue
        if before in skip.local_config.steps and not SkipManager.asked(role):
            raise NotInstalledError(
                f"is on, and step {before} went by without any stage that asked for it: nothing "
                "is skipped or cached",
                f"skip.{role}",
                "is it the role of this trainer? An agent_loop_manager_class of your own wants "
                f"SkipManager.annotate(role={role!r})",
            )
    SkipManager.set_step(step)


# -- the seams -----------------------------------------------------------------------------


def _beginning(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def beginning(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        begin(config)
        if "rollout" in SkipManager.skip_instances:
            _judge(type(self))
        init(self, config, *args, **kwargs)

    return beginning


def _judge(manager: type) -> None:
    """Whether rollouts pass through the stage, where `manager` makes them."""
    from rlskip.hosts.verl_job import refuse_main_ppo_sync, verl_version

    base = next(c for c in manager.__mro__ if c.__module__ == _AGENT_LOOP)
    if manager.generate_sequences is base.generate_sequences:  # type: ignore[attr-defined]
        return
    if verl_version() < (0, 9) and manager.__name__ == "AgentLoopManagerTQ":
        refuse_main_ppo_sync()
    log.warning(
        "rlskip: %s has a generate_sequences of its own: it is skipped only where it calls "
        "AgentLoopManager's, or is decorated with SkipManager.annotate(role='rollout')",
        manager.__qualname__,
    )


def _rollout_stage(method: Callable[..., Any]) -> Callable[..., Any]:
    """As verl has it: a coroutine under ``auto_await``, which looks at its caller's frame."""
    from verl.utils.ray_utils import auto_await

    # Below auto_await, and below verl 0.9's own decorator.
    stage = SkipManager.annotate(role="rollout")(inspect.unwrap(method))

    @functools.wraps(stage)
    async def generate_sequences(self: Any, prompts: Any) -> Any:
        step = prompts.meta_info.get("global_steps")
        if step is not None and not prompts.meta_info.get("validate"):
            SkipManager.set_step(step)
        rollouts = await stage(self, prompts)
        if _lacks_scores(self, rollouts):
            await asyncio.to_thread(_score, self, prompts, rollouts)
        return rollouts

    return auto_await(generate_sequences)  # type: ignore[no-any-return]


def _lacks_scores(manager: Any, rollouts: Any) -> bool:
    """Whether a replay left out, as asked, scores that verl's workers give while generating.

    With a reward model on the rollouts' own GPUs verl itself scores what has no scores yet.
    """
    skip = SkipManager.skip_instances.get("rollout")
    return (
        skip is not None
        and _SCORES in (skip.local_config.drop_fields or [])
        and _SCORES not in rollouts.batch.keys()  # noqa: SIM118 - iterating one gives rows
        and bool(manager.reward_loop_worker_handles)
    )


def _score(manager: Any, prompts: Any, rollouts: Any) -> None:
    """Add to `rollouts` what the reward function says today, as verl's own loop would."""
    from verl import DataProto
    from verl.experimental.reward_loop.reward_loop import (
        RewardLoopManager,
        resolve_reward_manager_cls,
    )

    old = rollouts.meta_info.pop("reward_extra_keys", [])
    for key in old:
        rollouts.non_tensor_batch.pop(key, None)
    workers = manager.reward_loop_worker_handles
    loop = SimpleNamespace(
        reward_model_manager=None,
        reward_manager_cls=resolve_reward_manager_cls(manager.config),
        # verl 0.8 wants equal shares.
        reward_loop_workers=workers if len(rollouts) % len(workers) == 0 else workers[:1],
    )
    known = {**prompts.non_tensor_batch, **rollouts.non_tensor_batch}
    scores = RewardLoopManager.compute_rm_score(loop, DataProto(rollouts.batch, known))
    rollouts.batch[_SCORES] = scores.batch[_SCORES]
    rollouts.non_tensor_batch.update(scores.non_tensor_batch)
    rollouts.meta_info.update(scores.meta_info)


def _take_over(module: ModuleType) -> None:
    """verl 0.9's decorators ask verl's manager at each call: it has no role, and ours begins."""
    theirs = module.SkipManager
    theirs.init = staticmethod(begin)
    theirs.set_step = staticmethod(next_step)
    theirs.skip_instances = {}
