"""verl's config: refuse what its trainer would ignore, and plug rlskip's parts into V1's.

Both processes call this: the launcher on a copy of the config, before any GPU is taken, and the
process that trains on the config itself.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection
from typing import Any

import attrs
from omegaconf import DictConfig, OmegaConf, open_dict

from rlskip.config.check import Problem, look_up, raise_all
from rlskip.config.dispatch import DispatchConfig, read_dispatch
from rlskip.config.merge import read_merge
from rlskip.config.nodes import find_node
from rlskip.config.replay import ReplayConfig, read_replay
from rlskip.config.settings import SkipSettings
from rlskip.config.skip import VALIDATION_ROLE
from rlskip.hosts.verl.config_keys import Values, values_of
from rlskip.hosts.verl.later_stages import refused, scores_while_generating
from rlskip.hosts.verl.names import (
    FILTER,
    FILTER_KEY,
    FULLY_ASYNC_MAIN,
    MANAGER_KEY,
    MODE_KEY,
    ONE_STEP_OFF,
    OUR_MANAGER,
    OUR_SAMPLER,
    SAMPLER_KEY,
)

log = logging.getLogger(__name__)

Roles = Collection[str]

log = logging.getLogger(__name__)

# Which of verl's trainers calls which role.
_TRAINERS = {
    "rollout": "verl's V0 trainer",
    "rollout_tq": "verl's V1 trainer",
    "async_rollout": "the fully async application",
}
# (role that is on, role that the trainer calls) -> how to get the trainer that calls it.
_OTHER_TRAINER = {
    ("rollout", "rollout_tq"): ", or trainer.use_v1=False",
    ("rollout_tq", "rollout"): ", or trainer.use_v1=True",
}

# Applications of verl whose loop cannot run on one machine without several GPUs.
_PARTLY_TESTED = {ONE_STEP_OFF: "one-step-off-policy", FULLY_ASYNC_MAIN: "the fully async trainer"}

# The modes in which sessions are journaled.
JOURNALED = ("sync", "colocate_async")
_BUFFER = {f"{SAMPLER_KEY}.custom_sampler.{key}": value for key, value in OUR_SAMPLER.items()}


def judge(config: DictConfig, skip: SkipSettings, main: str | None = None) -> None:
    """Refuse a config that the trainer it chooses cannot honour; a V1 config is changed.

    `skip` are its settings; `main` is the module of the application, if it is known. One that is
    not verl's has its own task runner, as verl's recipes have, which may make a V0 trainer whatever
    ``trainer.use_v1`` is: then the role tells which trainer it is.

    Raises
    ------
    ConfigError
        Names *every* problem.
    """
    roles, is_recipe = skip.roles, main is not None and not main.startswith("verl.")
    verl = values_of(config)
    if main in _PARTLY_TESTED:
        _warn_of_partly_tested(roles, _PARTLY_TESTED[main])
    if main == FULLY_ASYNC_MAIN or verl["async_training"] is not None:
        # The fully async application ignores its own use_v1 and has no V1 trainer.
        problems = _roles_not_called(roles, "async_rollout") + refused(verl, skip)
        problems += idle_nodes(config)
        if VALIDATION_ROLE in roles:
            what = f"{_TRAINERS['async_rollout']} has no stage for validation, which would generate"
            problems.append(Problem("skip.validation", what, "set skip.validation=generate"))
        raise_all(problems)
    elif main != ONE_STEP_OFF and verl["trainer.use_v1"] and not (is_recipe and "rollout" in roles):
        plug_in(config, roles, V1Settings.read(config), refused(verl, skip))
    else:
        problems = _roles_not_called(roles, "rollout") + refused(verl, skip)
        raise_all(problems + idle_nodes(config))


@attrs.frozen
class V1Settings:
    """What `dispatch` and `replay` ask of a V1 trainer."""

    dispatch: DispatchConfig
    replay: ReplayConfig

    @classmethod
    def read(cls, config: DictConfig) -> V1Settings:
        """Read both nodes; raises ConfigError."""
        return cls(read_dispatch(config), read_replay(config))


def plug_in(
    config: DictConfig, roles: Roles, settings: V1Settings, found: Collection[Problem] = ()
) -> None:
    """Plug rlskip's manager and replay buffer into a V1 config that asks for them.

    `found` are the problems that the config is known to have.

    Raises
    ------
    ConfigError
        Names *every* problem: a role that this trainer never calls, a manager or a sampler of
        the user's own, options of verl that rlskip's parts cannot honour.
    """
    verl = values_of(config)
    problems = [*found, *_roles_not_called(roles, "rollout_tq"), *idle_nodes(config, v1=True)]
    if verl[MODE_KEY] == "separate_async":
        _warn_of_partly_tested(roles, "separate_async")
    _plug_in_manager(config, verl, settings.dispatch, problems)
    # verl's own buffer does not know the markers of finished sessions.
    needs_ours = settings.dispatch.rollout_level or find_node(config, "replay") is not None
    if needs_ours or samples_with_ours(config):
        _plug_in_buffer(config, verl, settings.replay, problems)
    raise_all(problems)


def samples_with_ours(config: DictConfig) -> bool:
    """Whether rlskip's replay buffer is plugged in."""
    return all(look_up(config, key) == value for key, value in _BUFFER.items())


def _plug_in_manager(
    config: DictConfig, verl: Values, dispatch: DispatchConfig, problems: list[Problem]
) -> None:
    if dispatch.rollout_level:
        _choose(config, verl, MANAGER_KEY, OUR_MANAGER, problems)
        if dispatch.journal and verl[MODE_KEY] not in JOURNALED:
            what = f"no journal was tested with {verl[MODE_KEY]}"
            remedy = f"set {MODE_KEY}=colocate_async or sync, or dispatch.journal=false"
            problems.append(Problem("dispatch.journal", what, remedy))
        return
    if dispatch.journal:
        what = "verl's own workers run a prompt's sessions together and take none from a journal"
        remedy = "add +dispatch=rollout_level, or set dispatch.journal=false"
        problems.append(Problem("dispatch.journal", what, remedy))
    if verl[MANAGER_KEY] == OUR_MANAGER:
        what = f"{OUR_MANAGER} dispatches single sessions, and that is not switched on"
        problems.append(Problem(MANAGER_KEY, what, "set trainer.v1.rollout_level_dispatch=true"))


def _plug_in_buffer(
    config: DictConfig, verl: Values, settings: ReplayConfig, problems: list[Problem]
) -> None:
    where = f"{SAMPLER_KEY}.sync_refill_failed_groups"
    if verl[where]:
        if settings.on_incomplete not in ("raise", "refill"):
            what = f"it means replay.on_incomplete=refill, and that is {settings.on_incomplete}"
            problems.append(Problem(where, what, f"set {where}=false"))
        settings = dataclasses.replace(settings, on_incomplete="refill")
        _set(config, "data.gen_batch_size", 1)  # as verl does for this option
        verl = {**verl, "data.gen_batch_size": 1}
    kwargs = {**dataclasses.asdict(settings), **_group_filter(verl, settings, problems)}
    _check_sampler(verl, settings, kwargs, problems)
    for key, value in _BUFFER.items():
        _choose(config, verl, key, value, problems)
    _set(config, f"{SAMPLER_KEY}.sampler_kwargs", kwargs)


def _group_filter(verl: Values, settings: ReplayConfig, problems: list[Problem]) -> dict[str, Any]:
    """What rlskip's buffer needs to filter groups as verl's does; empty if that is off."""
    if not verl[FILTER_KEY]:
        return {}
    if not verl[f"{FILTER}.metric"]:
        remedy = f"set {FILTER}.metric=reward"
        problems.append(Problem(f"{FILTER}.metric", "no metric is set", remedy))
    if not scores_while_generating(verl):
        what = "the reward model on the rollouts' GPUs scores groups after they are sampled"
        remedy = "set reward.reward_model.enable_resource_pool=True"
        problems.append(Problem(FILTER_KEY, what, remedy))
    if settings.on_incomplete == "drop":
        what = "nothing replaces dropped groups, so a filtered batch would stay short"
        problems.append(Problem("replay.on_incomplete", what, "set replay.on_incomplete=refill"))
    if verl[f"{FILTER}.max_num_gen_batches"]:  # verl says the same of its own V1 buffer
        text = "rlskip: %s.max_num_gen_batches is ignored: replay.max_refills=%d bounds refills"
        log.warning(text, FILTER, settings.max_refills)
    return {"filter_groups": {"metric": verl[f"{FILTER}.metric"]}}


def _roles_not_called(roles: Roles, called: str) -> list[Problem]:
    """Built-in roles that are on, for a trainer that calls the role `called` only."""
    return [
        Problem(
            f"skip.{role}.enable",
            f"{_TRAINERS[called]} never calls a stage {role!r}: nothing would be skipped",
            f"use skip.{called} (+skip={called}_cache){_OTHER_TRAINER.get((role, called), '')}",
        )
        for role in roles
        if role in _TRAINERS.keys() - {called}
    ]


def idle_nodes(config: Any, *, v1: bool = False) -> list[Problem]:
    """Nodes of rlskip's that are on, and that the chosen trainer does nothing with."""
    found = []
    if find_node(config, "merge") is not None and read_merge(config).stepwise_output:
        what = "verl trains on the rows of its agent loops: nothing would be merged"
        remedy = "leave out +merge=..., and call rlskip.merge in an agent loop of your own"
        found.append(Problem("merge.stepwise_output", what, remedy))
    if v1:
        return found
    idle = [name for name in ("dispatch", "replay") if find_node(config, name) is not None]
    if "dispatch" in idle and not read_dispatch(config).rollout_level:
        idle.remove("dispatch")
    for name in idle:
        what = "verl's V1 trainer alone has a queue: nothing would change"
        found.append(Problem(name, what, f"set trainer.use_v1=True, or leave out +{name}=..."))
    return found


def _warn_of_partly_tested(roles: Roles, trainer: str) -> None:
    """Its weights travel to engines on other GPUs, so its stages were tested and not its loop."""
    if roles:
        what = "rlskip: %s was tested at the functions that verl decorates, and not as a whole"
        log.warning(what, trainer)


def _check_sampler(
    verl: Values, settings: ReplayConfig, kwargs: dict[str, Any], problems: list[Problem]
) -> None:
    """Options of verl's sampler that rlskip's buffer does not have."""
    where = f"{SAMPLER_KEY}.sampler_kwargs"
    if verl[where] not in (None, {}, kwargs):
        problems.append(Problem(where, "rlskip's buffer takes its settings from `replay`"))
    # With filter_groups verl fetches single prompts itself.
    fetches_one = verl[FILTER_KEY] or verl["data.gen_batch_size"] == 1
    if settings.on_incomplete == "refill" and not fetches_one:
        what = "replay.on_incomplete=refill fetches single prompts"
        problems.append(Problem("data.gen_batch_size", what, "set data.gen_batch_size=1"))


def _choose(
    config: DictConfig, verl: Values, key: str, value: str, problems: list[Problem]
) -> None:
    """Set `key` to ours; a problem if the user set it to something else."""
    theirs = verl[key]
    if theirs in (None, value):
        _set(config, key, value)
    else:
        what = f"it is {theirs!r}, and rlskip needs its own {value} here"
        remedy = "leave it null, or turn off rollout-level dispatch and `replay`"
        problems.append(Problem(key, what, remedy))


def _set(config: DictConfig, key: str, value: Any) -> None:
    with open_dict(config):
        OmegaConf.update(config, key, value, merge=False, force_add=True)
