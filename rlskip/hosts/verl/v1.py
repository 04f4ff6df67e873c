"""verl 0.9's V1 trainer: prompts go to TransferQueue, batches are sampled from it.

Seams, each wrapped when verl imports its module:

``PPOTrainer.__init__``
    The roles are switched on and the config is judged before any model is loaded;
    :mod:`~rlskip.hosts.verl.trainer_config` plugs in what `dispatch` and `replay` ask for.
``PPOTrainer._submit_batch_to_rollout``
    Role ``rollout_tq``, phase submit: the last place that sees the prompts. Validation does not
    pass here, so it is never skipped.
``ReplayBuffer._materialize_batch``
    Role ``rollout_tq``, phase sample: the last place that sees the roots. verl deletes them
    before its own ``sample`` returns.
``PPOTrainer._balance_batch``
    The first place that sees a sampled batch: rows without scores are scored.
``AgentLoopManagerTQ.generate_sequences``
    Where prompts carry their own number of sessions, rlskip's buffer is told that number.
``FullyAsyncAgentLoopManager.generate_sequences_single``
    Role ``async_rollout``, in the fully async rollouter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig
from tensordict import TensorDict

from rlskip.batch.meta import is_validation
from rlskip.config.dispatch import DispatchConfig
from rlskip.errors import NotInstalledError
from rlskip.hosts.attach import wrap
from rlskip.hosts.verl.names import FULLY_ASYNC, MANAGER_KEY, SCORES, V1
from rlskip.hosts.verl.run_queue import StatusQueue, run_queue
from rlskip.hosts.verl.trainer import begin, lacking_now, rollout_stage
from rlskip.hosts.verl.trainer_config import plug_in, samples_with_ours
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

_KEY = "rlskip.verl_v1"
_ROLE = "rollout_tq"


def attach() -> None:
    """Wrap the seams when verl imports their modules. Imports nothing of verl."""
    wrap(f"{V1}.trainer_base:PPOTrainer.__init__", _beginning, key=_KEY)
    wrap(f"{V1}.trainer_base:PPOTrainer._submit_batch_to_rollout", _submitting, key=_KEY)
    wrap(f"{V1}.trainer_base:PPOTrainer._balance_batch", _balancing, key=_KEY)
    wrap(f"{V1}.replay_buffer:ReplayBuffer._materialize_batch", _materializing, key=_KEY)
    wrap(f"{V1}.agent_loop_tq:AgentLoopManagerTQ.generate_sequences", _expecting, key=_KEY)
    wrap(
        f"{FULLY_ASYNC}:FullyAsyncAgentLoopManager.generate_sequences_single",
        rollout_stage("async_rollout"),
        key=_KEY,
    )


# The `dispatch` settings of the trainer in this process.
_dispatch: DispatchConfig | None = None


def dispatch_settings() -> DispatchConfig:
    """The `dispatch` settings that were read when the trainer of this process was made.

    Raises
    ------
    NotInstalledError
        No trainer was made, or rlskip's plug-in was not loaded before that.
    """
    if _dispatch is None:
        raise NotInstalledError(
            "no V1 trainer with rlskip's plug-in was made in this process",
            MANAGER_KEY,
            "run `rlskip doctor` to see whether verl loads the plug-in",
        )
    return _dispatch


def _beginning(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def beginning(self: Any, config: DictConfig, *args: Any, **kwargs: Any) -> None:
        global _dispatch
        begin(config)
        roles = {role: skip.local_config for role, skip in SkipManager.skip_instances.items()}
        _dispatch = plug_in(config, roles)
        init(self, config, *args, **kwargs)

    return beginning


# -- role rollout_tq -----------------------------------------------------------------------


def _submitting(submit: Callable[..., int]) -> Callable[..., int]:
    stage = SkipManager.annotate(
        role=_ROLE, stage="verl.submit", prompts="batch", queue=_queue_of, lacks=lacking_now
    )(submit)

    @functools.wraps(submit)
    def submitting(self: Any, batch: Any) -> int:
        stage(self, batch)
        return len(batch)  # as verl: replayed prompts are submitted, too

    return submitting


def _queue_of(trainer: Any, batch: Any) -> TrajectoryQueue:
    from rlskip.hosts.verl.buffer import FailClosedReplayBuffer

    ours = isinstance(trainer.replay_buffer, FailClosedReplayBuffer)
    return run_queue() if ours else StatusQueue(run_queue())


@SkipManager.annotate(role=_ROLE, phase="sample", queue=lambda *_: run_queue())
def _selected(
    partition_id: str, uids: Sequence[str], snapshot: Mapping[str, Mapping[str, Any]]
) -> KVBatchMeta:
    """The batch that verl is about to make of these prompts, in verl's order of rows."""
    chosen = set(uids)
    rows = {
        key: tag
        for key, tag in snapshot.items()
        if (row := split_trajectory(key)) is not None and row[0] in chosen
    }
    roots = {ROLLOUT_ROOT_KEYS: list(uids)}
    return KVBatchMeta(list(rows), [dict(t) for t in rows.values()], partition_id, None, roots)


def _materializing(materialize: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(materialize)
    def materializing(self: Any, partition_id: str, uids: Any, snapshot: Any) -> Any:
        if partition_id == TRAIN and _ROLE in SkipManager.skip_instances:
            _selected(partition_id, uids, snapshot)
        return materialize(self, partition_id, uids, snapshot)

    return materializing


def _balancing(balance: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(balance)
    def balancing(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        skip = SkipManager.skip_instances.get(_ROLE)
        workers = self.reward_loop_manager.reward_loop_worker_handles
        if skip is not None and SCORES in skip.local_config.drop_fields and workers is not None:
            from rlskip.hosts.verl.scores import score_again

            score_again(batch, run_queue(), workers)
        return balance(self, batch, *args, **kwargs)

    return balancing


# -- rlskip's buffer with verl's manager -----------------------------------------------------


def _expecting(generate: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(generate)
    def expecting(self: Any, prompts: TensorDict) -> None:
        if ROLLOUT_N in prompts.keys() and samples_with_ours(self.config):  # noqa: SIM118
            run_queue().put(
                [str(uid) for uid in prompts.get("uid").tolist()],
                VAL if is_validation(prompts) else TRAIN,
                tags=[{EXPECTED_ROLLOUTS: int(n)} for n in prompts.get(ROLLOUT_N).tolist()],
            )
        generate(self, prompts)

    return expecting
