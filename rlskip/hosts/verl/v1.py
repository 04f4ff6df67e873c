"""verl's V1 trainer: prompts go to TransferQueue, batches are sampled from it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from omegaconf import DictConfig
from tensordict import TensorDict

from rlskip._wrap import Seams
from rlskip.batch.meta import is_validation
from rlskip.batch.prompts import uids_of
from rlskip.config.check import look_up
from rlskip.config.skip import VALIDATION_ROLE
from rlskip.errors import NotInstalledError
from rlskip.hosts.verl.config_keys import values_of
from rlskip.hosts.verl.journals import tidy_journals, with_journals
from rlskip.hosts.verl.names import FILTER_KEY, FULLY_ASYNC, MANAGER_KEY, SCORES, V1, V1_TRAINER
from rlskip.hosts.verl.no_engine import refuse_to_generate
from rlskip.hosts.verl.preflight import before_workers, last_checkpoint
from rlskip.hosts.verl.run_queue import run_queue, status_queue
from rlskip.hosts.verl.trainer import begin, lacking_now, rollout_stage
from rlskip.hosts.verl.trainer_config import V1Settings, plug_in, samples_with_ours
from rlskip.keys import (
    EXPECTED_ROLLOUTS,
    ROLLOUT_N,
    ROLLOUT_ROOT_KEYS,
    TRAIN,
    VAL,
    split_trajectory,
)
from rlskip.queue import KVBatchMeta, TrajectoryQueue
from rlskip.skip import SkipManager
from rlskip.skip.arguments import ALL

_ROLE = "rollout_tq"
_BUFFER = f"{V1}.replay_buffer:ReplayBuffer"
_SUBMITTED_AT = "_rlskip_submitted_at"  # the trainer's attribute: the step of its last batch


_seams = Seams(__name__)
attach = _seams.attach
_seams.decorated(f"{FULLY_ASYNC}:FullyAsyncAgentLoopManager.generate_sequences_single")(
    rollout_stage("async_rollout")
)

# The settings of the trainer in this process.
_settings: V1Settings | None = None


def trainer_settings() -> V1Settings:
    """The settings that were read when the trainer of this process was made.

    Raises
    ------
    NotInstalledError
        No trainer was made, or rlskip's plug-in was not loaded before that.
    """
    if _settings is None:
        raise NotInstalledError(
            "no V1 trainer with rlskip's plug-in was made in this process",
            MANAGER_KEY,
            "run `rlskip doctor` to see whether verl loads the plug-in",
        )
    return _settings


@_seams.around(f"{V1_TRAINER}.__init__")
def _beginning(
    init: Callable[..., None], self: Any, config: DictConfig, *args: Any, **kwargs: Any
) -> None:
    """The roles are switched on and the config is judged before any model is loaded.

    :mod:`~rlskip.hosts.verl.trainer_config` plugs in what `dispatch` and `replay` ask for.
    """
    global _settings
    skip = begin(config)
    read = V1Settings.read(config)
    _settings = attrs.evolve(read, dispatch=with_journals(config, read.dispatch))
    plug_in(config, skip.roles, _settings)
    init(self, config, *args, **kwargs)


@_seams.around(f"{V1_TRAINER}._init_dataloader")
def _loading(load: Callable[..., None], self: Any) -> None:
    """The number of steps is known: steps without a dump are refused, an engine is left out."""
    load(self)
    before_workers(self.config, self.total_training_steps, self.steps_per_epoch)


def _submit_stages(
    submit: Callable[..., Any], role: str, stage: str, queue: Callable[..., Any], **options: Any
) -> dict[str, Callable[..., Any]]:
    """`submit` as a stage, for the first batch of a step and for its refills."""
    lacks = None if role == VALIDATION_ROLE else lacking_now
    return {
        phase: SkipManager.annotate(
            role, stage=stage, queue=queue, lacks=lacks, phase=phase, ignore=[ALL], **options
        )(submit)
        for phase in ("submit", "refill")
    }


# -- role rollout_tq -----------------------------------------------------------------------


@_seams.decorated(f"{V1_TRAINER}._submit_batch_to_rollout")
def _submitting(submit: Callable[..., int]) -> Callable[..., int]:
    """Phase submit: the last place that sees the prompts.

    Under ``algorithm.filter_groups`` a batch to replay is enlarged by the prompts that replaced
    filtered ones when its dump was made; what is submitted at the same step after that is a refill.
    Replayed rows without scores are scored.
    """
    stages = _submit_stages(submit, _ROLE, "verl.submit", _queue_of, prompts="batch")

    @functools.wraps(submit)
    def submitting(self: Any, batch: Any) -> int:
        skip = SkipManager.skip_instances.get(_ROLE)
        if skip is None:
            return submit(self, batch)
        submitted = len(batch)
        refills = getattr(self, _SUBMITTED_AT, None) == self.global_steps
        setattr(self, _SUBMITTED_AT, self.global_steps)
        if not refills and look_up(self.config, FILTER_KEY):
            batch = _with_dumped_refills(self, batch, skip)
        stages["refill" if refills else "submit"](self, batch)
        _score_dropped(skip, batch, self.reward_loop_manager.reward_loop_worker_handles)
        return submitted  # as verl: replayed prompts are submitted, too

    return submitting


def _score_dropped(
    skip: Any, prompts: Any, workers: Sequence[Any] | None, partition: str = TRAIN
) -> None:
    """Score the replayed rollouts of `prompts` if the role `skip` left out their scores.

    `workers` are verl's reward workers; None if a reward model on the rollouts' own GPUs scores
    what is sampled.
    """
    if SCORES in skip.local_config.drop_fields and workers:
        from rlskip.hosts.verl.scores import score_replayed

        score_replayed(uids_of(prompts), workers, partition)


def _with_dumped_refills(trainer: Any, batch: TensorDict, skip: Any) -> TensorDict:
    """`batch` and as many prompts of the data loader as were submitted beyond it for the dump."""
    more = skip.prompts_dumped(trainer.global_steps) - len(batch)
    if more <= 0:
        return batch
    from verl.utils import tensordict_utils

    return tensordict_utils.concat_tensordict([batch, trainer._next_train_batch(more)])


def _queue_of(trainer: Any, batch: Any) -> TrajectoryQueue:
    from rlskip.hosts.verl.buffer import FailClosedReplayBuffer

    ours = isinstance(trainer.replay_buffer, FailClosedReplayBuffer)
    return run_queue() if ours else status_queue()


def _rows_of(
    partition_id: str, uids: Sequence[str], snapshot: Mapping[str, Mapping[str, Any]]
) -> KVBatchMeta:
    """The batch of these prompts, in verl's order of rows."""
    chosen = set(uids)
    rows = {
        key: tag
        for key, tag in snapshot.items()
        if (row := split_trajectory(key)) is not None and row[0] in chosen
    }
    roots = {ROLLOUT_ROOT_KEYS: list(uids)}
    return KVBatchMeta(list(rows), [dict(t) for t in rows.values()], partition_id, None, roots)


def _observed(role: str, phase: str) -> Callable[..., Any]:
    return SkipManager.annotate(
        role, stage=f"verl.{phase}", phase=phase, queue=lambda *_: run_queue()
    )(_rows_of)


_evicted = _observed(_ROLE, "evict")
_sampled = {TRAIN: _observed(_ROLE, "sample"), VAL: _observed(VALIDATION_ROLE, "sample")}


@_seams.around(f"{_BUFFER}._materialize_batch")
def _materializing(
    materialize: Callable[..., Any], self: Any, partition_id: str, uids: Any, snapshot: Any
) -> Any:
    """Phase sample, in verl's partition ``val`` that of role ``rollout_val``.

    It is the last place that sees the roots: verl deletes them before its own ``sample`` returns.
    """
    if partition_id in _sampled and _ROLE in SkipManager.skip_instances:
        _sampled[partition_id](partition_id, uids, snapshot)
    return materialize(self, partition_id, uids, snapshot)


@_seams.around(f"{_BUFFER}._clear_groups")
def _clearing(clear: Callable[..., None], self: Any, partition_id: str, uids: set[str]) -> None:
    """Phase evict: filtered, failed, stale and surplus groups."""
    if partition_id == TRAIN and uids and _ROLE in SkipManager.skip_instances:
        _evicted(partition_id, sorted(uids), self.partitions[partition_id])
    clear(self, partition_id, uids)


@_seams.around(f"{_BUFFER}._select_prompt_uids")
def _selecting(
    select: Callable[..., Any], self: Any, partition_id: str, sampleable: Any, batch_size: int
) -> Any:
    """Groups of one step in the order in which they were submitted.

    verl chooses among them in the order of a set, which differs from run to run.
    """
    if _ROLE in SkipManager.skip_instances:
        submitted = self.prompt_global_steps[partition_id]
        sampleable = [uid for uid in submitted if uid in sampleable]
    return select(self, partition_id, sampleable, batch_size)


@_seams.around(f"{V1_TRAINER}._save_checkpoint")
def _saving(save: Callable[..., None], self: Any) -> None:
    """Journals of sessions that were trained before the checkpoint are removed."""
    save(self)
    tidy_journals(last_checkpoint(values_of(self.config)))


# -- role rollout_val ------------------------------------------------------------------------


@_seams.around(f"{V1_TRAINER}.fit")
def _fitting(
    fit: Callable[..., Any], self: Any, agent_loop_manager: Any, *args: Any, **kwargs: Any
) -> Any:
    """The manager that the trainer gets, of any class, submits validation by a stage."""
    if VALIDATION_ROLE in SkipManager.skip_instances:
        submit = agent_loop_manager.generate_sequences
        agent_loop_manager.generate_sequences = _validating(self, submit)
    return fit(self, agent_loop_manager, *args, **kwargs)


def _validating(trainer: Any, submit: Callable[[TensorDict], None]) -> Callable[..., None]:
    """`submit`, the manager's, with validation as a stage.

    A step's first batch may be a mismatch; the others are refills.
    """

    def validate(prompts: TensorDict) -> None:
        submit(prompts)

    queue = functools.partial(_queue_of, trainer)
    stages = _submit_stages(validate, VALIDATION_ROLE, "verl.validate", queue, partition_id=VAL)
    validated: int | None = None

    @functools.wraps(submit)
    def generate_sequences(prompts: TensorDict) -> None:
        nonlocal validated
        if not is_validation(prompts):
            submit(prompts)
            return
        phase = "refill" if validated == trainer.global_steps else "submit"
        validated = trainer.global_steps
        SkipManager.set_step(trainer.global_steps)
        stages[phase](prompts)
        workers = trainer.reward_loop_manager.reward_loop_worker_handles
        _score_dropped(SkipManager.skip_instances[VALIDATION_ROLE], prompts, workers, VAL)

    return generate_sequences


# -- rlskip's buffer with verl's manager -----------------------------------------------------


@_seams.around(f"{V1}.agent_loop_tq:AgentLoopManagerTQ.generate_sequences")
def _expecting(generate: Callable[..., None], self: Any, prompts: TensorDict) -> None:
    """Where prompts carry their own number of sessions, rlskip's buffer is told that number."""
    refuse_to_generate(self.config, prompts)
    if samples_with_ours(self.config) and ROLLOUT_N in prompts.keys():  # noqa: SIM118
        numbers = [{EXPECTED_ROLLOUTS: int(n)} for n in prompts.get(ROLLOUT_N).tolist()]
        uids = list(map(str, prompts.get("uid").tolist()))
        run_queue().put(uids, VAL if is_validation(prompts) else TRAIN, tags=numbers)
    generate(self, prompts)
