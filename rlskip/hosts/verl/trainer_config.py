"""verl's config: refuse what its trainer would ignore, and plug rlskip's parts into V1's.

The launcher process calls this on a copy, and the process that trains on the config itself.
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
_MANAGER_KEY = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
_SAMPLER = f"{SAMPLER_KEY}.custom_sampler"

# Which of verl's trainers calls which role, and how to get it instead of another.
_TRAINERS = {
    "rollout": "verl's V0 trainer",
    "rollout_tq": "verl's V1 trainer",
    "async_rollout": "the fully async application",
}
_OTHER_TRAINER = {"rollout": ", or trainer.use_v1=False", "rollout_tq": ", or trainer.use_v1=True"}


def judge(config: DictConfig, skip: SkipSettings, main: str | None = None) -> None:
    """Refuse a config that its trainer cannot honour; change a V1 config. `main`: the module."""
    # An application that is not verl's has its own task runner, as verl's recipes have, which may
    # make a V0 trainer whatever `trainer.use_v1` is: then the role tells which trainer it is.
    roles, is_recipe = skip.roles, main is not None and not main.startswith("verl.")
    # The fully async application ignores its own use_v1 and has no V1 trainer.
    is_async = main == FULLY_ASYNC_MAIN or look_up(config, "async_training") is not None
    is_v0 = main == ONE_STEP_OFF or (is_recipe and "rollout" in roles)
    is_v1 = not is_async and not is_v0 and look_up(config, "trainer.use_v1")
    problems = refused(config, skip) + idle_nodes(config, v1=is_v1)
    if is_v1:
        plug_in(config, roles, problems)
        return
    if is_async and VALIDATION_ROLE in roles:
        what = f"{_TRAINERS['async_rollout']} has no stage for validation, which would generate"
        problems.append(Problem("skip.validation", what, "set skip.validation=generate"))
    raise_all(problems + _roles_not_called(roles, "async_rollout" if is_async else "rollout"))


def plug_in(config: DictConfig, roles: Collection[str], found: Collection[Problem] = ()) -> None:
    """Plug rlskip's manager and replay buffer into a V1 config; all problems are named at once."""
    problems = [*found, *_roles_not_called(roles, "rollout_tq")]
    dispatch = read_node(DispatchConfig, config)
    # verl's own buffer does not know the markers of finished sessions.
    samples = dispatch.rollout_level or find_node(config, "replay") is not None
    chosen: dict[str, Any] = {_MANAGER_KEY: OUR_MANAGER} if dispatch.rollout_level else {}
    if samples:
        chosen |= {f"{_SAMPLER}.{part}": value for part, value in OUR_SAMPLER.items()}
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
    in_steps = look_up(config, MODE_KEY) in ("sync", "colocate_async")
    needed = {
        "add +dispatch=rollout_level": dispatch.rollout_level,
        "add +skip=rollout_tq_cache": "rollout_tq" in roles,
        f"set {MODE_KEY}=colocate_async or sync": in_steps,
    }
    if dispatch.journal and not all(needed.values()):
        what = "journals are of rollout-level dispatch, and beside the dumps of role rollout_tq"
        lacks = ", ".join(remedy for remedy, is_there in needed.items() if not is_there)
        remedy = f"{lacks}; or set dispatch.journal=false"
        problems.append(Problem("dispatch.journal", what, remedy))
    raise_all(problems)
    with open_dict(config):
        for key, value in chosen.items():
            OmegaConf.update(config, key, value, merge=False, force_add=True)


def _buffer_settings(config: DictConfig, problems: list[Problem]) -> dict[str, Any]:
    """What rlskip's buffer gets: the settings of `replay`, and those of verl that it honours."""
    settings = read_node(ReplayConfig, config)
    kwargs = dataclasses.asdict(settings)
    refills = f"{SAMPLER_KEY}.sync_refill_failed_groups"
    if look_up(config, FILTER_KEY):
        what = "rlskip's buffer keeps every complete group"
        remedy = "leave out `replay` and rollout-level dispatch: verl's own buffer filters"
        problems.append(Problem(FILTER_KEY, what, remedy))
    if look_up(config, refills):
        what = "rlskip's buffer refills by replay.on_incomplete"
        remedy = f"set {refills}=false, and replay.on_incomplete=refill"
        problems.append(Problem(refills, what, remedy))
    if settings.on_incomplete == "refill" and look_up(config, "data.gen_batch_size") != 1:
        what = "replay.on_incomplete=refill fetches single prompts"
        problems.append(Problem("data.gen_batch_size", what, "set data.gen_batch_size=1"))
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


def idle_nodes(config: Any, *, v1: bool) -> list[Problem]:
    """Nodes of rlskip's that are on, and that the chosen trainer does nothing with."""
    found = []
    if read_node(MergeConfig, config).stepwise_output:
        what = "verl trains on the rows of its agent loops: nothing would be merged"
        remedy = "leave out +merge=..., and call rlskip.merge in an agent loop of your own"
        found.append(Problem("merge.stepwise_output", what, remedy))
    dispatch = find_node(config, "dispatch") or {}
    level = read_node(DispatchConfig, config).rollout_level
    is_off = dispatch.get("rollout_level") is False or dispatch in ({}, vars(DispatchConfig()))
    if not (level or is_off):
        what = "it is not true: what else `dispatch` sets would change nothing"
        remedy = "add +dispatch=rollout_level, or set dispatch.rollout_level=false"
        found.append(Problem("dispatch.rollout_level", what, remedy))
    on = {"dispatch": level, "replay": find_node(config, "replay") is not None}
    for name in () if v1 else filter(on.get, on):
        what = "verl's V1 trainer alone has a queue: nothing would change"
        remedy = f"set trainer.use_v1=True, or leave out +{name}=..."
        found.append(Problem(name, what, remedy))
    return found
