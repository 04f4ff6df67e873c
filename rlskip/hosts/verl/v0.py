"""verl's V0 trainers: where workers are made, and where rollouts pass.

The fully async application, one-step-off and recipes derive from them.
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from rlskip._wrap import around
from rlskip.batch.meta import is_validation
from rlskip.config.check import look_up
from rlskip.config.skip import VALIDATION_ROLE
from rlskip.format.fingerprint import VOLATILE
from rlskip.hosts.verl.facts import without_times
from rlskip.hosts.verl.later_stages import REWARD, without_reference
from rlskip.hosts.verl.names import SCORES
from rlskip.hosts.verl.no_engine import refuse_to_generate
from rlskip.hosts.verl.preflight import before_workers
from rlskip.hosts.verl.seams import SEPARATE_TRAINER, V0_TRAINER, seams
from rlskip.hosts.verl.trainer import STAGES, begin, lacking_now, stated_step
from rlskip.skip import SkipManager
from rlskip.skip.names import ALL

# Fields of a rollout that are not its agent loop's.
_NOT_OF_THE_LOOP = ("__num_turns__", "multi_modal_inputs", "reward_extra_info")

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
    """``AgentLoopManager.generate_sequences``, below verl's ``auto_await``.

    The V0 trainers call it once a step or, with dynamic sampling, several times (role
    ``rollout``), and for each batch of validation (role ``rollout_val``).
    """

    @around
    async def generating(generate: Callable[..., Any], self: Any, prompts: Any) -> Any:
        refuse_to_generate(getattr(self, "config", None), prompts)
        return await generate(self, prompts)

    stages = {
        role: rollout_stage(role)(generating(generate)) for role in ("rollout", VALIDATION_ROLE)
    }

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
        if _is_scored_again(self, rollouts, role):
            await asyncio.to_thread(_score, self, fields, rollouts)
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
    with without_reference(self):
        init(self, *args, **kwargs)


def _set_step_of(prompts: Any) -> None:
    """Set the step that the batch states; else that of the trainer's loop, or the trainer's count.

    A batch of validation states its step even in trainers that state none for training.
    """
    counted = getattr(_trainer and _trainer(), "global_steps", None)
    stated = (prompts.meta_info.get("global_steps"), stated_step(), counted)
    step = next((step for step in stated if step is not None), None)
    if step is not None:
        SkipManager.set_step(step)


def _is_scored_again(manager: Any, rollouts: Any, role: str) -> bool:
    """Whether the role ``reward`` scores what `role` returned, or verl's workers do.

    The latter is so if a replay left out, as configured, scores that they give while generating.
    With a reward model on the rollouts' own GPUs verl itself scores what has no scores yet.
    """
    skip = SkipManager.skip_instances.get(role)
    if skip is None or SCORES not in skip.local_config.drop_fields:
        return False
    if (workers := manager.reward_loop_worker_handles) is None:
        return False
    left_out = SCORES not in rollouts.batch.keys()  # noqa: SIM118 - iterating one gives rows
    return REWARD in SkipManager.skip_instances or (left_out and bool(workers))


def _score(manager: Any, prompts: Mapping[str, Any], rollouts: Any) -> None:
    """Add the scores of today's reward function to `rollouts`, as verl's own loop would.

    `prompts` holds the fields of the prompts that are not tensors. Scores that `rollouts` have
    already are those of today, for the role ``reward`` to keep.
    """
    from verl import DataProto
    from verl.experimental.reward_loop import reward_loop

    names = rollouts.meta_info.pop("reward_extra_keys", [])
    extra = {key: rollouts.non_tensor_batch.pop(key, None) for key in names}
    given = None
    if SCORES in rollouts.batch.keys():  # noqa: SIM118
        given = DataProto(rollouts.batch.select(SCORES), extra, {"reward_extra_keys": names})
    workers = manager.reward_loop_worker_handles
    shares = workers and len(rollouts) % len(workers) == 0
    loop = SimpleNamespace(
        config=manager.config,
        given_scores=given,
        reward_model_manager=None,
        reward_manager_cls=reward_loop.resolve_reward_manager_cls(manager.config),
        # verl fills unequal shares with copies of rows, and would score these, too.
        reward_loop_workers=workers[: None if shares else 1],
    )
    extra_fields = {"tool_extra_fields": _of_the_loop(rollouts, prompts)}
    known = {**prompts, **rollouts.non_tensor_batch, **extra_fields}
    data = DataProto(rollouts.batch.exclude(SCORES), known)
    scores = reward_loop.RewardLoopManager.compute_rm_score(loop, data)
    rollouts.batch[SCORES] = scores.batch[SCORES]
    rollouts.non_tensor_batch.update(scores.non_tensor_batch)
    rollouts.meta_info.update(scores.meta_info)


def _of_the_loop(rollouts: Any, prompts: Mapping[str, Any]) -> Any:
    """What each session's agent loop returned besides tokens, as verl's worker sends it.

    A field that a loop did not return is None, because others returned it.
    """
    import numpy as np

    others = {*_NOT_OF_THE_LOOP, *prompts} - {"raw_prompt"}
    own = {name: of for name, of in rollouts.non_tensor_batch.items() if name not in others}
    sent = np.empty(len(rollouts), dtype=object)
    for i in range(len(sent)):
        sent[i] = {name: of[i] for name, of in own.items() if of[i] is not None}
    return sent
