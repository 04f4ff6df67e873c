"""verl before workers are made: what the run would need to generate, because no dump has it.

The launcher process looks before Ray starts, as far as the config tells; the process that trains
looks again when it has made its data loader and so knows the number of steps.
"""

from __future__ import annotations

from typing import Any

import attrs

from rlskip.config.check import Problem, look_up, raise_all
from rlskip.config.facts import HostFacts
from rlskip.config.settings import SkipSettings
from rlskip.hosts.verl.facts import with_steps
from rlskip.hosts.verl.later_stages import REF, REWARD, leave_out, loaded_identity
from rlskip.hosts.verl.names import MODE_KEY
from rlskip.hosts.verl.no_engine import choose
from rlskip.skip import SkipManager
from rlskip.skip.preflight import Roles, preflight


def problems(
    settings: SkipSettings, roles: Roles, trains: HostFacts | None = None
) -> list[Problem]:
    """All that a run of verl with these `roles` would have to generate although it must not.

    `trains` are the facts in the process that trains. Without a data loader it is certain that an
    epoch has one step.
    """
    config, facts = settings.facts.config, trains or with_steps(settings.facts, None, 1)
    if trains:  # the launcher process has verl's older keys of the reward still
        called_with = {role: loaded_identity(role, config) for role in roles.keys() & {REF, REWARD}}
        facts = attrs.evolve(facts, called_with=called_with)
    found = preflight(roles, facts, engine=settings.start_engine, here=trains is not None)
    if settings.start_engine:
        return found
    if look_up(config, "async_training") is not None:
        what = "the fully async application keeps its engine on separate GPUs"
        return [Problem("skip.start_engine", what, "set skip.start_engine=true")]
    if look_up(config, "trainer.use_v1") and look_up(config, MODE_KEY) == "separate_async":
        what = "separate_async keeps its engine on separate GPUs"
        remedy = f"set {MODE_KEY}=colocate_async, or skip.start_engine=true"
        found.append(Problem(MODE_KEY, what, remedy))
    key = "actor_rollout_ref.hybrid_engine"
    if look_up(config, key) is False:
        what = "the engine is on separate GPUs"
        found.append(Problem(key, what, f"set {key}=True, or skip.start_engine=true"))
    return found


def before_workers(config: Any, total: int | None, per_epoch: int | None = None) -> None:
    """Refuse the same in the process that trains, which now knows its steps; choose the engine.

    `total` and `per_epoch` are those of :func:`with_steps`.
    """
    settings = SkipManager.settings
    if settings is None or not settings.roles:
        return
    facts = with_steps(settings.facts, total, per_epoch)
    raise_all(problems(settings, SkipManager.skip_instances, facts))
    leave_out(config, facts.steps, facts.validated)
    if not settings.start_engine:
        choose(config)
