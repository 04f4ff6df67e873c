"""verl in the process that trains: its skip manager, whose decorators become rlskip's, and V0."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import weakref
from collections.abc import Callable
from typing import Any

import attrs

from rlskip.batch.columns import field_names
from rlskip.batch.meta import is_validation
from rlskip.config.check import look_up, raise_all
from rlskip.config.facts import HostFacts, application_facts
from rlskip.config.settings import SkipSettings, read_skip
from rlskip.config.skip import VALIDATION_ROLE
from rlskip.errors import NotInstalledError
from rlskip.format.fingerprint import VOLATILE
from rlskip.hosts.verl.facts import NEEDED, SCORES, without_times
from rlskip.hosts.verl.handshake import TOKEN_VARIABLE, refuse_unshared
from rlskip.hosts.verl.later_stages import adapt
from rlskip.hosts.verl.no_engine import before_workers
from rlskip.hosts.verl.queue import run_queue
from rlskip.hosts.verl.seams import LATER_STAGES, MANAGER, SEPARATE_TRAINER, V0_TRAINER, seams
from rlskip.hosts.verl.trainer_config import idle_nodes
from rlskip.jobs.records import job_id
from rlskip.skip import SkipManager
from rlskip.skip.names import ALL

log = logging.getLogger(__name__)

# The config that is installed in this process, and the step that verl's trainer stated last.
_installed: Any = None
_stated: int | None = None
# V0's trainer that made its workers last.
_trainer: weakref.ref[Any] | None = None


def begin(config: Any, *, v1: bool = False) -> SkipSettings:
    """Switch on the roles that a config enables, in this process; `v1`: there is a queue."""
    global _installed, _stated
    if _installed is config and SkipManager.settings is not None:
        return SkipManager.settings
    raise_all(idle_nodes(config, v1=v1))
    _stated = None
    if logging.getLogger("rlskip").level == logging.NOTSET:
        # verl shows warnings only, and the log must name what was replayed.
        logging.getLogger("rlskip").setLevel(logging.INFO)
    settings = read_skip(config, HostFacts())
    if settings.roles:  # before_workers knows the steps better
        facts = attrs.evolve(application_facts(config), steps=())
        settings = adapt(settings.complete(facts))
        if any(SCORES in (role.drop_fields or ()) for role in settings.roles.values()):
            seams.require(LATER_STAGES)
    SkipManager.init(settings)
    SkipManager.count_rollouts()
    if SkipManager.skip_instances:
        for feature, lacks in seams.off().items():
            log.warning("rlskip: this verl has no %s: off is %s", lacks, feature)
    for role, skip in SkipManager.skip_instances.items():
        if TOKEN_VARIABLE in os.environ:
            refuse_unshared(f"skip.{role}.dump_dir", skip.local_config.dump_dir, job_id())
        log.info("rlskip: in charge of role %s in process %d, job %s", role, os.getpid(), job_id())
    _installed = config
    return settings


def lacking_now(rollouts: Any) -> list[str]:
    """What the installed config needs and `rollouts`, of training, lack, each with its key."""
    has = field_names(rollouts)
    return [
        f"{field} ({key}={value})"
        for key, fields in NEEDED.items()
        if (value := look_up(_installed, key))
        for field in fields
        if field not in has
    ]


def next_step(step: int) -> None:
    """As ``SkipManager.set_step``; raises if a role was not called in the step before."""
    global _stated
    before, _stated = _stated, step
    for role, skip in SkipManager.skip_instances.items():
        has_own_steps = skip.support_online_step or skip.serves_validation
        if before is None or has_own_steps or before not in skip.local_config.steps:
            continue
        uncalled = seams.uncalled(role)
        names = ", ".join(f"{seam.target} (rlskip {seam.purpose})" for seam in uncalled)
        if skip.recorder is None:
            raise NotInstalledError(
                f"the role is on, and no stage called it in step {before}: nothing is skipped or "
                f"cached; this trainer does not call {names or 'it'}",
                f"skip.{role}",
                "does this trainer have that role? Your own agent_loop_manager_class needs "
                f"SkipManager.annotate(role={role!r})",
            )
        if uncalled:
            text = "rlskip: role %s: not called up to step %d, so rlskip does nothing there: %s"
            log.warning(text, role, before, names)
            seams.called.update(seam.target for seam in uncalled)  # they are named once
    SkipManager.set_step(step)


#: What becomes of verl's own stages, by their role. Any other is a stage like the user's.
STAGES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {}


@seams.around(f"{MANAGER}.init")
def _initializing(_: Callable[..., None], theirs: Any, config: Any) -> None:
    begin(config)  # no other seam of the fully async application sees that of its rollouter
    theirs.skip_instances = {}


@seams.around(f"{MANAGER}.set_step")
def _setting_step(set_step: Callable[..., None], theirs: Any, step: int) -> None:
    next_step(step)
    set_step(theirs, step)


@seams.around(f"{MANAGER}.annotate")
def _annotating(_: Any, __: Any, role: str, **___: Any) -> Callable[[Any], Any]:
    """verl's decorator; verl ignores further options."""
    options: dict[str, Any] = {"ignore": ["self"]}  # of what its object holds verl's config counts
    if role == "rollout_tq":
        options["queue"] = lambda *_, **__: run_queue()
    users: Any = SkipManager.annotate(role, **options)
    return lambda stage: _in_place_of(stage, role) or users(stage)


@seams.around(f"{MANAGER}.annotate_tq")
def _annotating_tq(_: Any, __: Any, role: str, phase: str) -> Callable[[Any], Any]:
    """verl's decorator of V1's two halves.

    Phase ``submit`` stays bare: its prompts pass `_submit_batch_to_rollout`, as refills do.
    """
    return lambda function: (phase == "sample" and _in_place_of(function, role)) or function


def _in_place_of(function: Callable[..., Any], role: str) -> Any:
    """What takes the place of `function`; None if it is not a seam."""
    target = f"{function.__module__}:{function.__qualname__}"
    is_seam = target in seams.table and role in STAGES
    return seams.marked(target, STAGES[role])(function) if is_seam else None


# -- V0, and the trainers that derive from it: where rollouts pass -----------------------------


def rollout_stage(role: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a coroutine function that returns rollouts as a DataProto."""
    return SkipManager.annotate(
        role=role,
        stage="verl.generate",
        lacks=None if role == VALIDATION_ROLE else lacking_now,
        totals={"timing": lambda rows: {}},
        ignore=[ALL],
        on_replay=without_times,
    )


def _rollouts(generate: Callable[..., Any]) -> Callable[..., Any]:
    """``AgentLoopManager.generate_sequences``, below verl's ``auto_await``."""
    stages = {role: rollout_stage(role)(generate) for role in ("rollout", VALIDATION_ROLE)}

    @functools.wraps(generate)
    async def generate_sequences(self: Any, prompts: Any) -> Any:
        validates = is_validation(prompts)
        replayable = VALIDATION_ROLE in SkipManager.skip_instances
        role = VALIDATION_ROLE if validates and replayable else "rollout"
        if replayable or not validates:
            _set_step_of(prompts)
        fields = dict(prompts.non_tensor_batch)  # before verl adds how it schedules them
        rollouts = await stages[role](self, prompts)
        # With a reward model on the rollouts' GPUs they carry the fields of their prompts.
        for name in VOLATILE & fields.keys() & rollouts.non_tensor_batch.keys():
            rollouts.non_tensor_batch[name] = fields[name]
        skip, trainer = SkipManager.skip_instances.get(role), None if not _trainer else _trainer()
        is_scored = SCORES in rollouts.batch.keys()  # noqa: SIM118 - iterating gives rows
        drops = skip is not None and SCORES in skip.local_config.drop_fields and not is_scored
        if drops and trainer is not None and self.reward_loop_worker_handles:
            from rlskip.hosts.verl.scores import score_rollouts

            manager = trainer.reward_loop_manager
            await asyncio.to_thread(score_rollouts, rollouts, fields, manager)
        return rollouts

    return generate_sequences


STAGES["rollout"] = _rollouts
STAGES["async_rollout"] = rollout_stage("async_rollout")


@seams.around(f"{V0_TRAINER}.init_workers", f"{SEPARATE_TRAINER}.init_workers")
def _making_workers(init: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """The number of steps is known. Trainers that never state the step count it in `self`."""
    global _trainer
    _trainer = weakref.ref(self)
    # The fully async application has two such trainers, and only one generates.
    if look_up(self.config, "async_training") is None:
        begin(self.config)
        loader = getattr(self, "train_dataloader", None)
        per_epoch = None if loader is None else len(loader)
        before_workers(self.config, getattr(self, "total_training_steps", None), per_epoch)
    init(self, *args, **kwargs)


def _set_step_of(prompts: Any) -> None:
    """Set the step of the batch; else that of the trainer's loop, or the trainer's count."""
    counted = getattr(_trainer and _trainer(), "global_steps", None)
    for step in (prompts.meta_info.get("global_steps"), _stated, counted):
        if step is not None:
            SkipManager.set_step(step)
            return
