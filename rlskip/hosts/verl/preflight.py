"""verl before workers are made: what the run would need to generate, because no dump has it.

The launcher process looks before Ray starts, as far as the config tells; the process that trains
looks again when it has made its data loader and so knows the number of steps.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from rlskip.config.application import TOTAL_STEPS
from rlskip.config.check import Problem, look_up, raise_all
from rlskip.config.facts import HostFacts
from rlskip.config.settings import SkipSettings
from rlskip.hosts.verl.later_stages import REF, REWARD, leave_out, loaded_identity
from rlskip.hosts.verl.names import MODE_KEY
from rlskip.hosts.verl.no_engine import choose
from rlskip.skip import SkipManager
from rlskip.skip.preflight import Roles, preflight

# A key that makes verl validate, whether a value of it does so, and the value that does not.
_VALIDATES = (
    ("trainer.val_before_train", lambda value: value is not False, "False"),
    ("trainer.test_freq", lambda value: (value or 0) > 0, "-1"),
    ("trainer.val_only", bool, "False"),
)


def problems(
    settings: SkipSettings,
    roles: Roles,
    total: int | None = None,
    per_epoch: int | None = 1,
    *,
    here: bool = False,
) -> list[Problem]:
    """All that a run of verl with these `roles` would have to generate although it must not.

    `total` and `per_epoch` are those of :func:`with_steps`: without a data loader it is certain
    that an epoch has one step. `here` tells whether this process trains.
    """
    config = settings.facts.config
    facts = with_steps(settings.facts, total, per_epoch)
    if here:  # the launcher process has verl's older keys of the reward still
        called_with = {role: loaded_identity(role, config) for role in roles.keys() & {REF, REWARD}}
        facts = attrs.evolve(facts, called_with=called_with)
    found = preflight(roles, facts, engine=settings.start_engine, here=here)
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


def with_steps(facts: HostFacts, total: int | None, per_epoch: int | None) -> HostFacts:
    """The facts of a run with the steps that it will take: those after its checkpoint.

    Parameters
    ----------
    total
        The step that is verl's last; None: ``trainer.total_training_steps``, if it is set.
    per_epoch
        The steps of an epoch, as the epochs may end before; None: they do not.
    """
    config = facts.config
    total, first = total or look_up(config, TOTAL_STEPS) or 0, _first_step(config)
    epochs = look_up(config, "trainer.total_epochs")
    end = total if None in (epochs, per_epoch) else min(total, epochs * per_epoch)
    steps = range(0) if look_up(config, "trainer.val_only") else range(first, end + 1)
    return attrs.evolve(
        facts,
        steps=steps,
        validated=_validated(config, first, steps, total),
        validates={key: off for key, does, off in _VALIDATES if does(look_up(config, key))},
    )


def before_ray(settings: SkipSettings) -> None:
    """In the launcher process: refuse what can never be replayed.

    Dumps are looked for where this machine is the one that trains, or sees its disk.

    Raises
    ------
    ConfigError
        Names every problem.
    """
    address = look_up(settings.facts.config, "ray_kwargs.ray_init.address")
    elsewhere = "RAY_ADDRESS" in os.environ or address
    roles = {
        role: skip
        for role, skip in SkipManager.skip_instances.items()
        if not elsewhere or Path(str(skip.local_config.dump_dir)).is_dir()
    }
    raise_all(problems(settings, roles))


def before_workers(config: Any, total: int | None, per_epoch: int | None = None) -> None:
    """Refuse the same in the process that trains, which now knows its steps; choose the engine.

    `total` and `per_epoch` are those of :func:`with_steps`.

    Raises
    ------
    ConfigError
        Names every problem.
    """
    settings = SkipManager.settings
    if settings is None or not settings.roles:
        return
    raise_all(problems(settings, SkipManager.skip_instances, total, per_epoch, here=True))
    facts = with_steps(settings.facts, total, per_epoch)
    leave_out(config, facts.steps, facts.validated)
    if not settings.start_engine:
        choose(config)


def _validated(config: Any, first: int, steps: Sequence[int], last: int) -> list[int]:
    """The steps at which verl validates, of a run that trains `steps`; it does so at its `last`."""
    before = [first - 1] if look_up(config, "trainer.val_before_train") is not False else []
    every = look_up(config, "trainer.test_freq") or 0
    return before + [s for s in steps if every > 0 and (s % every == 0 or s == last)]


def _first_step(config: Any) -> int:
    """The step after the checkpoint that verl will load; 1 without one."""
    mode = look_up(config, "trainer.resume_mode")
    if mode == "resume_path":
        found = re.search(r"global_step_(\d+)/*$", str(look_up(config, "trainer.resume_from_path")))
        return int(found[1]) + 1 if found else 1
    return last_checkpoint(config) + 1 if mode == "auto" else 1


def last_checkpoint(config: Any) -> int:
    """The step of the last checkpoint that verl has saved; 0 without one."""
    folder = look_up(config, "trainer.default_local_dir")
    try:
        latest = Path(folder or "", "latest_checkpointed_iteration.txt")
        return int(latest.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
