"""verl's V1 trainer: prompts go to TransferQueue, batches are sampled from it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig

from rlskip.batch.columns import uids_of
from rlskip.config.check import look_up
from rlskip.config.skip import VALIDATION_ROLE
from rlskip.hosts.verl.facts import FILTER_KEY, SCORES
from rlskip.hosts.verl.later_stages import validation
from rlskip.hosts.verl.no_engine import before_workers
from rlskip.hosts.verl.queue import ROLE, StatusQueue, evicted, observed, run_queue
from rlskip.hosts.verl.seams import V1_BUFFER, V1_TRAINER, seams
from rlskip.hosts.verl.trainer import STAGES, begin, lacking_now
from rlskip.hosts.verl.trainer_config import plug_in
from rlskip.keys import ROLLOUT_ROOT_KEYS, TRAIN, VAL, split_trajectory
from rlskip.queue import KVBatchMeta
from rlskip.skip import SkipManager
from rlskip.skip.names import ALL

_SUBMITTED_AT = "_rlskip_submitted_at"  # the trainer's attribute: the step of its last batch
_SELECTED = "_rlskip_selected"  # the buffer's attribute: its partition as it was last selected from


@seams.around(f"{V1_TRAINER}.__init__")
def _beginning(
    init: Callable[..., None], self: Any, config: DictConfig, *args: Any, **kwargs: Any
) -> None:
    """The roles are switched on and the config is judged before any model is loaded."""
    plug_in(config, begin(config, v1=True).roles)
    init(self, config, *args, **kwargs)


@seams.around(f"{V1_TRAINER}._init_dataloader")
def _loading(load: Callable[..., None], self: Any) -> None:
    """The number of steps is known: steps without a dump are refused, an engine is left out."""
    load(self)
    before_workers(self.config, self.total_training_steps, self.steps_per_epoch)


_status_queue = functools.cache(StatusQueue)


def _submitted(submit: Callable[..., Any], role: str, stage: str, **options: Any) -> dict[str, Any]:
    """`submit` as a stage, for the first batch of a step and for its refills."""
    options |= {"queue": lambda *_, **__: _status_queue(), "ignore": [ALL]}
    options["lacks"] = None if role == VALIDATION_ROLE else lacking_now
    return {
        phase: SkipManager.annotate(role, stage=stage, phase=phase, **options)(submit)
        for phase in ("submit", "refill")
    }


def _score_dropped(trainer: Any, role: str, prompts: Any, partition: str) -> None:
    """Score the replayed rollouts of `prompts` if the role left out their scores."""
    manager = trainer.reward_loop_manager
    drops = SCORES in SkipManager.skip_instances[role].local_config.drop_fields
    if drops and manager.reward_loop_worker_handles:
        from rlskip.hosts.verl.scores import score_queued

        score_queued(uids_of(prompts), partition, manager)


@seams.decorated(f"{V1_TRAINER}._submit_batch_to_rollout")
def _submitting(submit: Callable[..., int]) -> Callable[..., int]:
    """Phase submit: the last place that sees the prompts.

    Under ``algorithm.filter_groups`` a batch to replay is enlarged by the prompts that replaced
    filtered ones when its dump was made; what is submitted at the same step after that is a refill.
    """
    stages = _submitted(submit, ROLE, "verl.submit", prompts="batch")

    @functools.wraps(submit)
    def submitting(self: Any, batch: Any) -> int:
        skip: Any = SkipManager.skip_instances.get(ROLE)
        if skip is None:
            return submit(self, batch)
        submitted = len(batch)
        refills = getattr(self, _SUBMITTED_AT, None) == self.global_steps
        setattr(self, _SUBMITTED_AT, self.global_steps)
        if not refills and look_up(self.config, FILTER_KEY):
            from verl.utils import tensordict_utils

            if (more := skip.prompts_dumped(self.global_steps) - submitted) > 0:
                batch = tensordict_utils.concat_tensordict([batch, self._next_train_batch(more)])
        stages["refill" if refills else "submit"](self, batch)
        _score_dropped(self, ROLE, batch, TRAIN)
        return submitted  # as verl: replayed prompts are submitted, too

    return submitting


@seams.around(f"{V1_TRAINER}._validate")
def _validating(validate: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """While it validates, the trainer's manager, of any class, submits by a stage."""
    if VALIDATION_ROLE not in SkipManager.skip_instances:
        return validation(validate, self, *args, **kwargs)
    manager = self.agent_loop_manager
    submit = manager.generate_sequences
    phases = itertools.chain(["submit"], itertools.repeat("refill"))  # the first may mismatch
    stages = _submitted(
        lambda prompts: submit(prompts), VALIDATION_ROLE, "verl.validate", partition_id=VAL
    )

    def generate_sequences(prompts: Any) -> None:
        SkipManager.set_step(self.global_steps)
        stages[next(phases)](prompts)
        _score_dropped(self, VALIDATION_ROLE, prompts, VAL)

    manager.generate_sequences = generate_sequences
    try:
        return validate(self, *args, **kwargs)
    finally:
        manager.generate_sequences = submit


def _sampling(sample: Callable[..., Any]) -> Callable[..., Any]:
    """``ReplayBuffer.sample``, in verl's partition ``val`` a stage of role ``rollout_val``."""

    def queue(self: Any, *_: Any, **__: Any) -> Any:
        """The run's queue as it was when a batch was selected: then verl deletes the roots.

        Roots carry what a prompt was submitted for, be it by the process that made the checkpoint.
        """
        listing = vars(self).get(_SELECTED, {})
        return SimpleNamespace(list=lambda _: listing, get=run_queue().get)

    stages = observed(sample, queue)

    @functools.wraps(sample)
    def sampling(self: Any, global_steps: int, partition_id: str, batch_size: int) -> Any:
        return stages.get(partition_id, sample)(self, global_steps, partition_id, batch_size)

    return sampling


STAGES[ROLE] = _sampling


@seams.around(f"{V1_BUFFER}._select_prompt_uids")
def _selecting(
    select: Callable[..., Any], self: Any, partition_id: str, sampleable: Any, batch_size: int
) -> Any:
    """Groups in the order in which they were submitted: verl's, of a set, differs by run."""
    if ROLE in SkipManager.skip_instances:
        setattr(self, _SELECTED, run_queue().list(partition_id))
        submitted = self.prompt_global_steps[partition_id]
        sampleable = [uid for uid in submitted if uid in sampleable]
    return select(self, partition_id, sampleable, batch_size)


@seams.around(f"{V1_BUFFER}._clear_groups")
def _clearing(clear: Callable[..., None], self: Any, partition_id: str, uids: set[str]) -> None:
    """Phase evict: filtered, failed, stale and surplus groups."""
    if partition_id == TRAIN and uids and ROLE in SkipManager.skip_instances:
        rows = {  # in verl's order
            key: dict(tag)
            for key, tag in self.partitions[partition_id].items()
            if (row := split_trajectory(key)) is not None and row[0] in uids
        }
        roots = {ROLLOUT_ROOT_KEYS: sorted(uids)}
        evicted(KVBatchMeta(list(rows), list(rows.values()), partition_id, None, roots))
    clear(self, partition_id, uids)
