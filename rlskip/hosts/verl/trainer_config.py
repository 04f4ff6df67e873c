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
from rlskip.config.dispatch import DispatchConfig, read_dispatch
from rlskip.config.merge import read_merge
from rlskip.config.nodes import find_node
from rlskip.config.replay import ReplayConfig, read_replay
from rlskip.config.settings import SkipSettings
from rlskip.config.skip import VALIDATION_ROLE
from rlskip.hosts.verl import names
from rlskip.hosts.verl.later_stages import refused, scores_while_generating

Roles = Collection[str]

# verl's settings of staleness, which the same keys of `replay` replace.
_OFF_POLICY = ("max_off_policy_threshold", "max_off_policy_strategy")

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


def judge(config: DictConfig, skip: SkipSettings, main: str | None = None) -> None:
    """Refuse a config that the trainer it chooses cannot honour; a V1 config is changed.

    `skip` are its settings; `main` is the module of the application, if it is known. One that is
    not verl's has its own task runner, as verl's recipes have, which may make a V0 trainer whatever
    ``trainer.use_v1`` is: then the role tells which trainer it is.
    """
    roles, is_recipe = skip.roles, main is not None and not main.startswith("verl.")
    problems = refused(config, skip)
    if main == names.FULLY_ASYNC_MAIN or look_up(config, "async_training") is not None:
        # The fully async application ignores its own use_v1 and has no V1 trainer.
        problems += _roles_not_called(roles, "async_rollout") + idle_nodes(config)
        if VALIDATION_ROLE in roles:
            what = f"{_TRAINERS['async_rollout']} has no stage for validation, which would generate"
            problems.append(Problem("skip.validation", what, "set skip.validation=generate"))
        raise_all(problems)
        return
    is_v1 = main != names.ONE_STEP_OFF and look_up(config, "trainer.use_v1")
    if is_v1 and not (is_recipe and "rollout" in roles):
        plug_in(config, roles, problems)
    else:
        raise_all(problems + _roles_not_called(roles, "rollout") + idle_nodes(config))


def plug_in(config: DictConfig, roles: Roles, found: Collection[Problem] = ()) -> None:
    """Plug rlskip's manager and replay buffer into a V1 config that asks for them.

    `found` are the problems that the config is known to have. The error names every one: a role
    that this trainer never calls, a manager or a sampler of the user's own, options of verl that
    rlskip's parts cannot honour.
    """
    problems = [*found, *_roles_not_called(roles, "rollout_tq"), *idle_nodes(config, v1=True)]
    dispatch = read_dispatch(config)
    _plug_in_manager(config, dispatch, problems)
    if dispatch.journal and "rollout_tq" not in roles:
        what = "journals are beside the dumps of role rollout_tq, and that is off"
        problems.append(Problem("dispatch.journal", what, "add +skip=rollout_tq_cache"))
    # verl's own buffer does not know the markers of finished sessions.
    if dispatch.rollout_level or find_node(config, "replay") is not None:
        _plug_in_buffer(config, read_replay(config), problems)
    raise_all(problems)


def samples_with_ours(config: Any) -> bool:
    """Whether rlskip's replay buffer is plugged in."""
    return bool(look_up(config, names.SAMPLER_CLASS_KEY) == names.OUR_SAMPLER)


def _plug_in_manager(config: DictConfig, dispatch: DispatchConfig, problems: list[Problem]) -> None:
    if dispatch.rollout_level:
        _choose(config, names.MANAGER_KEY, names.OUR_MANAGER, problems)
        mode = look_up(config, names.MODE_KEY)
        if dispatch.journal and mode not in ("sync", "colocate_async"):
            what = f"no journal was tested with {mode}"
            remedy = f"set {names.MODE_KEY}=colocate_async or sync, or dispatch.journal=false"
            problems.append(Problem("dispatch.journal", what, remedy))
    elif dispatch.journal:
        what = "verl's own workers run a prompt's sessions together and take none from a journal"
        remedy = "add +dispatch=rollout_level, or set dispatch.journal=false"
        problems.append(Problem("dispatch.journal", what, remedy))


def _plug_in_buffer(config: DictConfig, settings: ReplayConfig, problems: list[Problem]) -> None:
    """Plug in rlskip's buffer, with the settings of `replay` and those of verl that it honours."""
    refills = settings.on_incomplete == "refill"
    if look_up(config, key := f"{names.SAMPLER_KEY}.sync_refill_failed_groups"):
        what = "rlskip's buffer refills by replay.on_incomplete"
        problems.append(Problem(key, what, f"set {key}=false, and replay.on_incomplete=refill"))
    # With filter_groups verl fetches single prompts itself.
    fetches_one = look_up(config, names.FILTER_KEY) or look_up(config, "data.gen_batch_size") == 1
    if refills and not fetches_one:
        what = "replay.on_incomplete=refill fetches single prompts"
        problems.append(Problem("data.gen_batch_size", what, "set data.gen_batch_size=1"))
    kwargs = dataclasses.asdict(settings)
    is_sync = look_up(config, names.MODE_KEY) == "sync"  # and on-policy
    if not is_sync and settings.max_off_policy_strategy == "none":
        theirs = {name: look_up(config, f"{names.SAMPLER_KEY}.{name}") for name in _OFF_POLICY}
        kwargs |= theirs if None not in theirs.values() else {}
    kwargs |= _group_filter(config, settings, problems)
    where = f"{names.SAMPLER_KEY}.sampler_kwargs"
    if look_up(config, where) not in (None, {}, kwargs):
        problems.append(Problem(where, "rlskip's buffer takes its settings from `replay`"))
    for part, value in names.OUR_SAMPLER.items():
        _choose(config, f"{names.SAMPLER_CLASS_KEY}.{part}", value, problems)
    _set(config, where, kwargs)


def _group_filter(
    config: DictConfig, settings: ReplayConfig, problems: list[Problem]
) -> dict[str, Any]:
    """What rlskip's buffer needs to filter groups as verl's does; empty if that is off."""
    if not look_up(config, names.FILTER_KEY):
        return {}
    metric = look_up(config, f"{names.FILTER}.metric")
    if not metric:
        remedy = f"set {names.FILTER}.metric=reward"
        problems.append(Problem(f"{names.FILTER}.metric", "no metric is set", remedy))
    if not scores_while_generating(config):
        what = "the reward model on the rollouts' GPUs scores groups after they are sampled"
        remedy = "set reward.reward_model.enable_resource_pool=True"
        problems.append(Problem(names.FILTER_KEY, what, remedy))
    if settings.on_incomplete == "drop":
        what = "nothing replaces dropped groups, so a filtered batch would stay short"
        problems.append(Problem("replay.on_incomplete", what, "set replay.on_incomplete=refill"))
    return {"filter_groups": {"metric": metric}}


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


def _choose(config: DictConfig, key: str, value: str, problems: list[Problem]) -> None:
    """Set `key` to ours; a problem if the user set it to something else."""
    theirs = look_up(config, key)
    if theirs in (None, value):
        _set(config, key, value)
    else:
        what = f"it is {theirs!r}, and rlskip needs its own {value} here"
        remedy = "leave it null, or turn off rollout-level dispatch and `replay`"
        problems.append(Problem(key, what, remedy))


def _set(config: DictConfig, key: str, value: Any) -> None:
    with open_dict(config):
        OmegaConf.update(config, key, value, merge=False, force_add=True)
