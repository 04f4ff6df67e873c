"""verl 0.9's V1 trainer: prompts go to TransferQueue, batches are sampled from it.

Four seams, each wrapped when its module is imported:

``PPOTrainer.__init__``
    The config is judged before any model is loaded, and what `dispatch` and `replay` ask for is
    plugged in.
``PPOTrainer._submit_batch_to_rollout``
    Role ``rollout_tq``: the last place that sees the prompts. Validation does not pass here, so
    it is never skipped.
``ReplayBuffer._materialize_batch``
    Role ``rollout_tq``: the last place that sees the roots; verl clears them before its own
    ``sample`` returns.
``PPOTrainer._balance_batch``
    The first to see a sampled batch: rows that came without their scores get new ones.
``AgentLoopManagerTQ.generate_sequences``
    Where prompts say themselves how many sessions they get, rlskip's buffer is told.
``FullyAsyncAgentLoopManager.generate_sequences_single``
    Role ``async_rollout``, in the fully async rollouter.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict

from rlskip.config.check import Problem, node_of, raise_all
from rlskip.config.dispatch import read_dispatch
from rlskip.config.replay import ReplayConfig, read_replay
from rlskip.config.skip import look_up, read_roles
from rlskip.hosts.attach import wrap
from rlskip.keys import (
    EXPECTED_ROLLOUTS,
    FINISHED,
    ROLLOUT_N,
    ROLLOUT_ROOT_KEYS,
    STATUS,
    TRAIN,
    VAL,
    N,
    split_session,
    split_trajectory,
)
from rlskip.queue import KVBatchMeta, Row, Tag, TrajectoryQueue, TransferQueueAdapter, Watch
from rlskip.skip import SkipManager
from rlskip.skip.base import role_specs
from rlskip.skip.call import is_validation

_KEY = "rlskip.verl_v1"
_V1 = "verl.trainer.ppo.v1"
_ROLE = "rollout_tq"
_SCORES = "rm_scores"

# Which of verl's trainers asks which role; and how to get the one that asks yours.
_ASKING = {
    "rollout": "verl's V0 trainer",
    _ROLE: "verl's V1 trainer",
    "async_rollout": "verl's fully async rollouter",
}
_OTHERWISE = {
    ("rollout", _ROLE): ", or trainer.use_v1=False",
    (_ROLE, "rollout"): ", or on verl 0.9 trainer.use_v1=True",
}

_MANAGER = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
_SAMPLER = "trainer.v1.sampler"
_FILTER = "algorithm.filter_groups.enable"
OUR_MANAGER = "rlskip.hosts.verl_dispatch.SessionManager"
OUR_SAMPLER = {"path": "pkg://rlskip.hosts.verl_replay", "name": "FailClosedReplayBuffer"}
_BUFFER = {f"{_SAMPLER}.custom_sampler.{key}": value for key, value in OUR_SAMPLER.items()}


def attach_v1() -> None:
    """Wrap the seams, now or when verl imports them."""
    wrap(f"{_V1}.trainer_base:PPOTrainer.__init__", _prepared, key=_KEY)
    wrap(f"{_V1}.trainer_base:PPOTrainer._submit_batch_to_rollout", _submitting, key=_KEY)
    wrap(f"{_V1}.trainer_base:PPOTrainer._balance_batch", _balancing, key=_KEY)
    wrap(f"{_V1}.replay_buffer:ReplayBuffer._materialize_batch", _materializing, key=_KEY)
    wrap(f"{_V1}.agent_loop_tq:AgentLoopManagerTQ.generate_sequences", _expecting, key=_KEY)
    wrap(
        "verl.experimental.fully_async_policy.fully_async_rollouter:"
        "FullyAsyncAgentLoopManager.generate_sequences_single",
        SkipManager.annotate(role="async_rollout"),
        key=_KEY,
    )


@functools.cache
def _join_queue() -> TransferQueueAdapter:
    return TransferQueueAdapter()


def queue(*args: Any, **kwargs: Any) -> TransferQueueAdapter:
    """The run's TransferQueue, as this process reaches it; takes any call's arguments."""
    return _join_queue()


# -- role rollout_tq -----------------------------------------------------------------------


def _submitting(submit: Callable[..., int]) -> Callable[..., int]:
    stage = SkipManager.annotate(role=_ROLE, prompts="batch", queue=_queue_of)(submit)

    @functools.wraps(submit)
    def submitting(self: Any, batch: Any) -> int:
        stage(self, batch)
        return len(batch)  # as verl: replayed prompts are submitted, too

    return submitting


def _queue_of(trainer: Any, batch: Any) -> TrajectoryQueue:
    from rlskip.hosts.verl_replay import FailClosedReplayBuffer

    ours = isinstance(trainer.replay_buffer, FailClosedReplayBuffer)
    return queue() if ours else StatusQueue(queue())


class StatusQueue(TrajectoryQueue):
    """A queue whose reader is verl's own buffer: prompts have a status, and all else is a row.

    A dump made under rollout-level dispatch holds markers, and prompts that are ready by
    counting them. Such a prompt is put as finished (only whole groups are replayed), and keys
    that have a tag and no data are not put at all.
    """

    def __init__(self, inner: TrajectoryQueue) -> None:
        self._inner = inner

    def put(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: TensorDict | Sequence[Row] | None = None,
        tags: Sequence[Tag] | None = None,
    ) -> KVBatchMeta:
        if fields is None and tags is not None:
            prompts = {
                key: _with_status(tag)
                for key, tag in zip(keys, tags, strict=True)
                if split_trajectory(key) is None and split_session(key) is None
            }
            if not prompts:
                return KVBatchMeta(partition_id=partition_id)
            keys, tags = list(prompts), list(prompts.values())
        return self._inner.put(keys, partition_id, fields, tags)

    def get(
        self, keys: Sequence[str], partition_id: str, fields: Sequence[str] | None = None
    ) -> TensorDict:
        return self._inner.get(keys, partition_id, fields)

    def list(self, partition_id: str) -> dict[str, dict[str, Any]]:
        return self._inner.list(partition_id)

    def clear(self, keys: Sequence[str], partition_id: str) -> None:
        self._inner.clear(keys, partition_id)

    def watch(self) -> Watch:
        return self._inner.watch()


def _with_status(tag: Tag) -> Tag:
    if N not in tag:
        return tag
    counted = (N, EXPECTED_ROLLOUTS)
    return {**{k: v for k, v in tag.items() if k not in counted}, STATUS: FINISHED}


@SkipManager.annotate(role=_ROLE, phase="sample", queue=queue)
def selected(
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
            selected(partition_id, uids, snapshot)
        return materialize(self, partition_id, uids, snapshot)

    return materializing


def _balancing(balance: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(balance)
    def balancing(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        skip = SkipManager.skip_instances.get(_ROLE)
        workers = self.reward_loop_manager.reward_loop_worker_handles
        if skip is not None and _SCORES in skip.local_config.drop_fields and workers is not None:
            from rlskip.hosts.verl_scores import score_again

            score_again(batch, queue(), workers)
        return balance(self, batch, *args, **kwargs)

    return balancing


# -- our buffer beside verl's manager --------------------------------------------------------


def _expecting(generate: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(generate)
    def expecting(self: Any, prompts: TensorDict) -> None:
        if ROLLOUT_N in prompts.keys() and _samples_with_ours(self.config):  # noqa: SIM118
            queue().put(
                [str(uid) for uid in prompts.get("uid").tolist()],
                VAL if is_validation(prompts) else TRAIN,
                tags=[{EXPECTED_ROLLOUTS: int(n)} for n in prompts.get(ROLLOUT_N).tolist()],
            )
        generate(self, prompts)

    return expecting


def _samples_with_ours(config: DictConfig) -> bool:
    return all(look_up(config, key) == value for key, value in _BUFFER.items())


# -- the config, before any GPU work -------------------------------------------------------


def _prepared(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def prepared(self: Any, config: DictConfig, *args: Any, **kwargs: Any) -> None:
        prepare(config)
        init(self, config, *args, **kwargs)

    return prepared


def prepare(config: DictConfig) -> None:
    """Judge the config of a V1 run, and plug in what it asks for: our manager, our buffer.

    Raises
    ------
    ConfigError
        Names *every* problem: a role that this trainer has no stage for, a manager or a sampler
        of the user's own beside ours, verl's options that ours cannot honour.
    """
    if look_up(config, "async_training") is not None:
        # The fully async application: its use_v1 says nothing, and it has no V1 trainer.
        raise_all(foreign_roles(config, "async_rollout"))
        return
    problems = foreign_roles(config, _ROLE)
    role = _roles(config).get(_ROLE)
    if role and _SCORES in role.drop_fields and look_up(config, _FILTER):
        what = f"verl needs {_SCORES} when it samples, and dropped ones are made after that"
        problems.append(Problem(f"skip.{_ROLE}.drop_fields", what, f"set {_FILTER}=false"))
    _plug_in_manager(config, problems)
    _plug_in_buffer(config, problems)
    raise_all(problems)


def _plug_in_manager(config: DictConfig, problems: list[Problem]) -> None:
    dispatch = read_dispatch(config)
    if dispatch.rollout_level:
        _choose(config, _MANAGER, OUR_MANAGER, problems)
        if dispatch.journal:
            what = "verl's workers write their rows themselves, so there is nothing to journal"
            problems.append(Problem("dispatch.journal", what))
    elif look_up(config, _MANAGER) == OUR_MANAGER:
        what = f"{OUR_MANAGER} hands out single sessions, and that is not switched on"
        problems.append(Problem(_MANAGER, what, "set trainer.v1.rollout_level_dispatch=true"))


def _plug_in_buffer(config: DictConfig, problems: list[Problem]) -> None:
    # verl's own does not know the markers that tell when a prompt's sessions are over.
    needed = read_dispatch(config).rollout_level or node_of(config, "replay") is not None
    if not (needed or _samples_with_ours(config)):
        return
    settings = read_replay(config)
    _check_sampler(config, settings, problems)
    for key, value in _BUFFER.items():
        _choose(config, key, value, problems)
    _set(config, f"{_SAMPLER}.sampler_kwargs", dataclasses.asdict(settings))


def foreign_roles(config: DictConfig, ours: str) -> list[Problem]:
    """Built-in roles that are on and that the trainer never asks, which asks only `ours`."""
    return [
        Problem(
            f"skip.{role}.enable",
            f"{_ASKING[ours]} never calls a stage {role!r}: nothing would be skipped",
            f"use skip.{ours} (+skip={ours}_cache)" + _OTHERWISE.get((role, ours), ""),
        )
        for role in _roles(config)
        if role in _ASKING.keys() - {ours}
    ]


def _roles(config: DictConfig) -> dict[str, Any]:
    """The roles that are on."""
    import rlskip.skip.roles
    import rlskip.skip.rollout_tq  # noqa: F401 - register the built-in roles

    return dict(read_roles(config, role_specs()))


def _check_sampler(config: DictConfig, settings: ReplayConfig, problems: list[Problem]) -> None:
    """What verl's config asks of a sampler and ours does not do."""
    where = f"{_SAMPLER}.sampler_kwargs"
    if look_up(config, where) not in (None, {}, dataclasses.asdict(settings)):
        problems.append(Problem(where, "rlskip's buffer has its settings from `replay`"))
    where = f"{_SAMPLER}.sync_refill_failed_groups"
    if look_up(config, where):
        problems.append(Problem(where, "is verl's own buffer's", "use replay.on_incomplete=refill"))
    if look_up(config, _FILTER):
        problems.append(Problem(_FILTER, "rlskip's buffer filters no groups by reward"))
    if settings.on_incomplete == "refill" and look_up(config, "data.gen_batch_size") != 1:
        what = "replay.on_incomplete=refill fetches single prompts"
        problems.append(Problem("data.gen_batch_size", what, "set data.gen_batch_size=1"))


def _choose(config: DictConfig, key: str, value: str, problems: list[Problem]) -> None:
    """Set `key` to ours; a problem where the user set something else there."""
    theirs = look_up(config, key)
    if theirs in (None, value):
        _set(config, key, value)
    else:
        what = f"{theirs!r} stands where rlskip's own {value} is needed"
        problems.append(
            Problem(key, what, "leave it null, or do without rollout-level dispatch and `replay`")
        )


def _set(config: DictConfig, key: str, value: Any) -> None:
    with open_dict(config):
        OmegaConf.update(config, key, value, merge=False, force_add=True)
