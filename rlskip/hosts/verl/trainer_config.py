"""verl's config: refuse what its trainer would ignore, and plug rlskip's parts into V1's.

Both processes call this: the launcher on a copy of the config, before any GPU is taken, and the
process that trains on the config itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from rlskip.config.check import Problem, look_up, raise_all
from rlskip.config.nodes import find_node, read_node
from rlskip.config.other_nodes import DispatchConfig, MergeConfig, ReplayConfig
from rlskip.config.settings import SkipSettings
from rlskip.config.skip import VALIDATION_ROLE
from rlskip.hosts.verl.facts import FILTER_KEY, MODE_KEY, SAMPLER_KEY
from rlskip.hosts.verl.later_stages import refused

#: Applications of verl that do not train by ``trainer.use_v1``.
ONE_STEP_OFF = "verl.experimental.one_step_off_policy.main_ppo"
FULLY_ASYNC_MAIN = "verl.experimental.fully_async_policy.fully_async_main"

#: rlskip's manager and replay buffer, and the keys by which V1's trainer finds them.
OUR_MANAGER = "rlskip.hosts.verl.session_workers.SessionManager"
OUR_SAMPLER = {"path": "pkg://rlskip.hosts.verl.queue", "name": "FailClosedReplayBuffer"}
_OURS = {
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class": OUR_MANAGER,
    **{f"{SAMPLER_KEY}.custom_sampler.{part}": value for part, value in OUR_SAMPLER.items()},
}

# Which of verl's trainers calls which role, and how to get it instead of another.
_TRAINERS = {
    "rollout": "verl's V0 trainer",
    "rollout_tq": "verl's V1 trainer",
    "async_rollout": "the fully async application",
}
_OTHER_TRAINER = {"rollout": ", or trainer.use_v1=False", "rollout_tq": ", or trainer.use_v1=True"}


def judge(config: DictConfig, skip: SkipSettings, main: str | None = None) -> None:
    """Refuse a config that the trainer it chooses cannot honour; a V1 config is changed.

    `skip` are its settings; `main` is the module of the application, if it is known.
    """
    # An application that is not verl's has its own task runner, as verl's recipes have, which may
    # make a V0 trainer whatever `trainer.use_v1` is: then the role tells which trainer it is.
    roles, is_recipe = skip.roles, main is not None and not main.startswith("verl.")
    problems = refused(config, skip)
    if main == FULLY_ASYNC_MAIN or look_up(config, "async_training") is not None:
        # The fully async application ignores its own use_v1 and has no V1 trainer.
        problems += _roles_not_called(roles, "async_rollout") + idle_nodes(config)
        if VALIDATION_ROLE in roles:
            what = f"{_TRAINERS['async_rollout']} has no stage for validation, which would generate"
            problems.append(Problem("skip.validation", what, "set skip.validation=generate"))
        raise_all(problems)
        return
    is_v1 = main != ONE_STEP_OFF and look_up(config, "trainer.use_v1")
    if is_v1 and not (is_recipe and "rollout" in roles):
        plug_in(config, roles, problems)
    else:
        raise_all(problems + _roles_not_called(roles, "rollout") + idle_nodes(config))


def plug_in(config: DictConfig, roles: Collection[str], found: Collection[Problem] = ()) -> None:
    """Plug rlskip's manager and replay buffer into a V1 config that asks for them.

    The error names every problem, those that the config is known to have (`found`) among them.
    """
    problems = [*found, *_roles_not_called(roles, "rollout_tq"), *idle_nodes(config, v1=True)]
    dispatch = read_node(DispatchConfig, config)
    # verl's own buffer does not know the markers of finished sessions.
    samples = dispatch.rollout_level or find_node(config, "replay") is not None
    chosen: dict[str, Any] = {
        key: ours
        for key, ours in _OURS.items()
        if (dispatch.rollout_level if ours == OUR_MANAGER else samples)
    }
    for key, ours in chosen.items():
        if (theirs := look_up(config, key)) not in (None, ours):
            what = f"it is {theirs!r}, and rlskip needs its own {ours} here"
            remedy = "leave it null, or turn off rollout-level dispatch and `replay`"
            problems.append(Problem(key, what, remedy))
    if samples:
        key, kwargs = f"{SAMPLER_KEY}.sampler_kwargs", _buffer_settings(config, problems)
        if look_up(config, key) not in (None, {}, kwargs):
            problems.append(Problem(key, "rlskip's buffer takes its settings from `replay`"))
        chosen[key] = kwargs
    if dispatch.journal:
        lacks = []
        if not dispatch.rollout_level:
            lacks.append("add +dispatch=rollout_level")
        if "rollout_tq" not in roles:
            lacks.append("add +skip=rollout_tq_cache")
        if look_up(config, MODE_KEY) not in ("sync", "colocate_async"):
            lacks.append(f"set {MODE_KEY}=colocate_async or sync")
        if lacks:
            what = "journals are of rollout-level dispatch, and beside the dumps of role rollout_tq"
            remedy = f"{', '.join(lacks)}; or set dispatch.journal=false"
            problems.append(Problem("dispatch.journal", what, remedy))
    raise_all(problems)
    with open_dict(config):
        for key, value in chosen.items():
            OmegaConf.update(config, key, value, merge=False, force_add=True)


def _buffer_settings(config: DictConfig, problems: list[Problem]) -> dict[str, Any]:
    """What rlskip's buffer gets: the settings of `replay`, and those of verl that it honours."""
    settings = read_node(ReplayConfig, config)
    kwargs = dataclasses.asdict(settings)

    def refuse(where: str, what: str, remedy: str) -> None:
        problems.append(Problem(where, what, remedy))

    if look_up(config, FILTER_KEY):
        what = "rlskip's buffer keeps every complete group"
        remedy = "leave out `replay` and rollout-level dispatch: verl's own buffer filters"
        refuse(FILTER_KEY, what, remedy)
    if look_up(config, key := f"{SAMPLER_KEY}.sync_refill_failed_groups"):
        what = "rlskip's buffer refills by replay.on_incomplete"
        refuse(key, what, f"set {key}=false, and replay.on_incomplete=refill")
    if settings.on_incomplete == "refill" and look_up(config, "data.gen_batch_size") != 1:
        what = "replay.on_incomplete=refill fetches single prompts"
        refuse("data.gen_batch_size", what, "set data.gen_batch_size=1")
    # A sync trainer is on-policy.
    if look_up(config, MODE_KEY) != "sync" and settings.max_off_policy_strategy == "none":
        names = ("max_off_policy_threshold", "max_off_policy_strategy")
        theirs = {name: look_up(config, f"{SAMPLER_KEY}.{name}") for name in names}
        kwargs |= theirs if None not in theirs.values() else {}
    return kwargs


def _roles_not_called(roles: Collection[str], called: str) -> list[Problem]:
    """Built-in roles that are on, for a trainer that calls the role `called` only."""
    others = {} if called == "async_rollout" else _OTHER_TRAINER
    return [
        Problem(
            f"skip.{role}.enable",
            f"{_TRAINERS[called]} never calls a stage {role!r}: nothing would be skipped",
            f"use skip.{called} (+skip={called}_cache){others.get(role, '')}",
        )
        for role in roles
        if role in _TRAINERS.keys() - {called}
    ]


def idle_nodes(config: Any, *, v1: bool = False) -> list[Problem]:
    """Nodes of rlskip's that are on, and that the chosen trainer does nothing with."""
    found = []
    if find_node(config, "merge") is not None and read_node(MergeConfig, config).stepwise_output:
        what = "verl trains on the rows of its agent loops: nothing would be merged"
        remedy = "leave out +merge=..., and call rlskip.merge in an agent loop of your own"
        found.append(Problem("merge.stepwise_output", what, remedy))
    idle = [name for name in ("dispatch", "replay") if find_node(config, name) is not None]
    if "dispatch" in idle and not read_node(DispatchConfig, config).rollout_level:
        idle.remove("dispatch")
    for name in () if v1 else idle:
        what = "verl's V1 trainer alone has a queue: nothing would change"
        found.append(Problem(name, what, f"set trainer.use_v1=True, or leave out +{name}=..."))
    return found
