"""verl before workers are made: what the run would need to generate, because no dump has it.

The launcher process looks before Ray starts, as far as the config tells; the process that trains
looks again when it has made its data loader and so knows the number of steps.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlskip.config.application import TOTAL_STEPS
from rlskip.config.check import Problem, look_up, raise_all
from rlskip.config.skip import VALIDATION_ROLE
from rlskip.config.steps import compact
from rlskip.hosts.verl.no_engine import choose
from rlskip.hosts.verl.trainer_config import MODE_KEY
from rlskip.skip import SkipManager
from rlskip.skip.look_ahead import holes
from rlskip.skip.role import BaseSkip

_ENGINE = "skip.start_engine=false"
# A key that makes verl validate, whether a value of it does so, and the value that does not.
_VALIDATES = (
    ("trainer.val_before_train", lambda value: value is not False, "False"),
    ("trainer.test_freq", lambda value: (value or 0) > 0, "-1"),
    ("trainer.val_only", bool, "False"),
)


def problems(
    config: Any, roles: Mapping[str, BaseSkip], *, start_engine: bool, total: int | None = None
) -> list[Problem]:
    """All that a run of verl with these `roles` would have to generate although it must not.

    `total` is the number of the last step; None: ``trainer.total_training_steps``, if it is set.
    """
    total = total or look_up(config, TOTAL_STEPS)
    first = _first_step(config)
    trains = total and not look_up(config, "trainer.val_only")
    steps = list(range(first, total + 1)) if trains else []
    validated = _validated(config, first, steps)
    found = holes(roles, steps, validated)
    if start_engine:
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
    if VALIDATION_ROLE not in roles:
        what = f"validation generates, and {_ENGINE}"
        found += [
            Problem(key, what, f"set {key}={off}, or skip.validation=replay")
            for key, validates, off in _VALIDATES
            if validates(look_up(config, key))
        ]
    return found + _unlisted(roles, steps, validated)


def _unlisted(
    roles: Mapping[str, BaseSkip], steps: list[int], validated: list[int]
) -> list[Problem]:
    """A problem for each role that does not list all of its steps."""
    found = []
    for role, skip in roles.items():
        due = validated if skip.serves_validation else steps
        unlisted = [step for step in due if step not in skip.local_config.steps]
        if not unlisted:
            continue
        what = f"steps {compact(unlisted)} are not listed and would generate, and {_ENGINE}"
        if skip.serves_validation:
            remedy = f"set skip.{role}.steps=all"
        else:
            remedy = f"set 'skip.steps=\"{compact(steps)}\"'"
            if unlisted[0] > steps[0]:
                remedy += f", or train fewer steps: {TOTAL_STEPS}={unlisted[0] - 1}"
        found.append(Problem(f"skip.{role}.steps", what, remedy))
    return found


def before_ray(config: Any) -> None:
    """In the launcher process: refuse what can never be replayed.

    Dumps are looked for where this machine is the one that trains, or sees its disk.

    Raises
    ------
    ConfigError
        Names every problem.
    """
    elsewhere = "RAY_ADDRESS" in os.environ or look_up(config, "ray_kwargs.ray_init.address")
    roles = {
        role: skip
        for role, skip in SkipManager.skip_instances.items()
        if not elsewhere or Path(str(skip.local_config.dump_dir)).is_dir()
    }
    raise_all(problems(config, roles, start_engine=SkipManager.start_engine))


def before_workers(config: Any, total: int | None) -> None:
    """Refuse the same in the process that trains, which now knows its last step; choose the engine.

    Raises
    ------
    ConfigError
        Names every problem.
    """
    start_engine = SkipManager.start_engine
    raise_all(problems(config, SkipManager.skip_instances, start_engine=start_engine, total=total))
    if not start_engine:
        choose(config)


def _validated(config: Any, first: int, steps: Sequence[int]) -> list[int]:
    """The steps at which verl validates, of a run that trains `steps`."""
    before = [first - 1] if look_up(config, "trainer.val_before_train") is not False else []
    every = look_up(config, "trainer.test_freq") or 0
    return before + [s for s in steps if every > 0 and (s % every == 0 or s == steps[-1])]


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
