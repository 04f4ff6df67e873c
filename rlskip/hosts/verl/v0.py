"""verl's V0 trainers, and those that derive from them: where rollouts pass."""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Callable
from typing import Any

from rlskip.batch.meta import is_validation
from rlskip.config.check import look_up
from rlskip.config.skip import VALIDATION_ROLE
from rlskip.format.fingerprint import VOLATILE
from rlskip.hosts.verl.facts import SCORES, without_times
from rlskip.hosts.verl.no_engine import before_workers
from rlskip.hosts.verl.seams import SEPARATE_TRAINER, V0_TRAINER, seams
from rlskip.hosts.verl.trainer import STAGES, begin, lacking_now, stated_step
from rlskip.skip import SkipManager
from rlskip.skip.names import ALL

# The trainer that made its workers last.
_trainer: weakref.ref[Any] | None = None


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
    for step in (prompts.meta_info.get("global_steps"), stated_step(), counted):
        if step is not None:
            SkipManager.set_step(step)
            return
