"""verl in the process that trains: its skip manager, whose decorators become rlskip's, and V0.

The V1 trainer's seams are in :mod:`rlskip.hosts.verl.v1`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import attrs

from rlskip._wrap import around
from rlskip.batch.meta import is_validation
from rlskip.config.application import application_facts
from rlskip.config.check import look_up, raise_all
from rlskip.config.facts import HostFacts
from rlskip.config.settings import SkipSettings, read_skip
from rlskip.config.skip import VALIDATION_ROLE
from rlskip.errors import NotInstalledError
from rlskip.format.fingerprint import VOLATILE
from rlskip.hosts.verl.fields import lacking, without_times
from rlskip.hosts.verl.handshake import acknowledge, find_job
from rlskip.hosts.verl.later_stages import REWARD, adapt, without_reference
from rlskip.hosts.verl.names import (
    AGENT_LOOP,
    SCORES,
    SEPARATE_TRAINER,
    SKIP_MANAGER,
    V0_TRAINER,
)
from rlskip.hosts.verl.no_engine import refuse_to_generate
from rlskip.hosts.verl.preflight import before_workers
from rlskip.hosts.verl.run_queue import run_queue
from rlskip.hosts.verl.seams import VALIDATION, seams
from rlskip.hosts.verl.supported_versions import refuse_old_release
from rlskip.hosts.verl.trainer_config import idle_nodes
from rlskip.jobs.records import job_id
from rlskip.skip import SkipManager
from rlskip.skip.arguments import ALL

log = logging.getLogger(__name__)

_MANAGER = f"{SKIP_MANAGER}:SkipManager"

# The config that is installed in this process.
_installed: Any = None

# The roles whose seams were named because this trainer does not call them.
_named: set[str] = set()

# Fields of a rollout that are not its agent loop's.
_NOT_OF_THE_LOOP = ("__num_turns__", "multi_modal_inputs", "reward_extra_info")

# The step that verl's trainer stated last.
_stated: int | None = None

# The trainer that made its workers last, and the step that was set here last: what a batch stated,
# or the trainer counted. Any other step of SkipManager's was stated by the trainer's loop.
_trainer: weakref.ref[Any] | None = None
_set_here: int | None = None


def begin(config: Any) -> SkipSettings:
    """Switch on, in this process, the roles that a run's config enables, and acknowledge them.

    Returns the settings of `skip`. Does nothing more if `config` is installed already.

    Raises
    ------
    AttachError
        A feature is asked for that this release of verl has no seam for.
    ConfigError
        Names every problem of the `skip` node, or the acknowledgement cannot be written.
    """
    global _installed, _stated
    if _installed is config and SkipManager.settings is not None:
        return SkipManager.settings
    _stated = None
    find_job()
    if logging.getLogger("rlskip").level == logging.NOTSET:
        # verl shows warnings only, and the log must name what was replayed.
        logging.getLogger("rlskip").setLevel(logging.INFO)
    settings = read_skip(config, HostFacts())
    if settings.roles:  # before_workers knows the steps better
        settings = settings.complete(attrs.evolve(application_facts(config), steps=()))
        adapt(settings)
        if {VALIDATION_ROLE, "rollout_tq"} <= settings.roles.keys():
            seams.require(VALIDATION)
    SkipManager.init(settings)
    SkipManager.count_rollouts()
    if SkipManager.skip_instances:
        refuse_old_release()
        for feature, lacks in seams.off().items():
            log.warning("rlskip: this verl has no %s: off is %s", lacks, feature)
    for role, skip in SkipManager.skip_instances.items():
        acknowledge(role, skip.local_config.dump_dir)
        log.info("rlskip: in charge of role %s in process %d, job %s", role, os.getpid(), job_id())
    _installed = config
    _named.clear()
    return settings


def next_step(step: int) -> None:
    """As ``SkipManager.set_step``; each role must have been called in the step before.

    Raises
    ------
    NotInstalledError
        A role was not called: this trainer has no stage for it, or rlskip does not know the stage.
    """
    global _stated
    before, _stated = _stated, step
    for role, skip in SkipManager.skip_instances.items():
        if before is None or skip.support_online_step or skip.serves_validation:
            continue
        if before not in skip.local_config.steps:
            continue
        uncalled = [f"{seam.target} (rlskip {seam.purpose})" for seam in seams.uncalled(role)]
        if not SkipManager.was_called(role):
            raise NotInstalledError(
                f"the role is on, and no stage called it in step {before}: nothing is skipped or "
                "cached" + "; this trainer does not call " * bool(uncalled) + ", ".join(uncalled),
                f"skip.{role}",
                "does this trainer have that role? Your own agent_loop_manager_class needs "
                f"SkipManager.annotate(role={role!r})",
            )
        if uncalled and role not in _named:
            _named.add(role)
            log.warning(
                "rlskip: role %s: not called up to step %d, so rlskip does nothing there: %s",
                role, before, ", ".join(uncalled),
            )  # fmt: skip
    SkipManager.set_step(step)


# -- verl's manager, which its trainers call; its own roles stay off ---------------------------

#: What becomes of verl's own stages, by their role. Any other is a stage like the user's.
STAGES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {}


@seams.around(f"{_MANAGER}.init")
def _initializing(_: Callable[..., None], theirs: Any, config: Any) -> None:
    begin(config)
    theirs.skip_instances = {}


@seams.around(f"{_MANAGER}.set_step")
def _setting_step(set_step: Callable[..., None], theirs: Any, step: int) -> None:
    next_step(step)
    set_step(theirs, step)


@seams.around(f"{_MANAGER}.annotate")
def _annotating(_: Any, __: Any, role: str, **___: Any) -> Callable[[Any], Any]:
    """verl's decorator; verl ignores further options.

    It must be replaced before verl's modules use it: a seam that is decorated says so otherwise.
    """

    def decorate(stage: Callable[..., Any]) -> Callable[..., Any]:
        target = f"{stage.__module__}:{stage.__qualname__}"
        if target in seams.table and role in STAGES:
            return seams.marked(target, STAGES[role](stage))  # type: ignore[no-any-return]
        queue = {"queue": lambda *_, **__: run_queue()}
        options: dict[str, Any] = queue if role == "rollout_tq" else {}
        # Of what its object holds verl's config is compared.
        return SkipManager.annotate(role, ignore=["self"], **options)(stage)

    return decorate


@seams.around(f"{_MANAGER}.annotate_tq")
def _annotating_tq(_: Any, __: Any, role: str, phase: str) -> Callable[[Any], Any]:
    """verl's decorator of V1's two halves.

    What is under phase ``submit`` stays bare: its prompts pass `_submit_batch_to_rollout`, as
    refills and the warm-up do, which verl decorates nowhere.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        target = f"{function.__module__}:{function.__qualname__}"
        if phase != "sample" or target not in seams.table:
            return function
        return seams.marked(target, STAGES[role](function))  # type: ignore[no-any-return]

    return decorate


# -- V0 ----------------------------------------------------------------------------------------


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


def lacking_now(rollouts: Any) -> list[str]:
    """What the installed config needs and `rollouts`, of training, do not have."""
    return lacking(_installed, rollouts)


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
        raise_all(idle_nodes(self.config))
        begin(self.config)
        loader = getattr(self, "train_dataloader", None)
        per_epoch = None if loader is None else len(loader)
        before_workers(self.config, getattr(self, "total_training_steps", None), per_epoch)
    with without_reference(self):
        init(self, *args, **kwargs)
    if "rollout" in SkipManager.skip_instances:
        _check_manager(type(getattr(self, "async_rollout_manager", None)))


def _check_manager(manager: type) -> None:
    """Warn if `manager` generates rollouts without passing through verl's method."""
    base = next((c for c in manager.__mro__ if c.__module__ == AGENT_LOOP), manager)
    if getattr(manager, "generate_sequences", None) is getattr(base, "generate_sequences", None):
        return
    log.warning(
        "rlskip: %s overrides generate_sequences: rollouts are skipped only if the override calls "
        "AgentLoopManager's method, or is decorated with SkipManager.annotate(role='rollout')",
        manager.__qualname__,
    )


def _set_step_of(prompts: Any) -> None:
    """Set the step that the batch states; else that of the trainer's loop, or the trainer's count.

    A batch of validation states its step even in trainers that state none for training.
    """
    global _set_here
    step = prompts.meta_info.get("global_steps")
    if step is None and SkipManager.step in (None, _set_here):
        counted = getattr(_trainer and _trainer(), "global_steps", None)
        step = counted if _stated is None else _stated
    if step is not None:
        SkipManager.set_step(step)
        _set_here = SkipManager.step


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
        tool_extra_fields=_of_the_loop(rollouts, prompts),
        reward_model_manager=None,
        reward_manager_cls=reward_loop.resolve_reward_manager_cls(manager.config),
        # verl fills unequal shares with copies of rows, and would score these, too.
        reward_loop_workers=workers[: None if shares else 1],
    )
    known = {**prompts, **rollouts.non_tensor_batch}
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
