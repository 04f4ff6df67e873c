"""V1's TransferQueue: what enters it, rlskip's replay buffer that samples it, and its journals.

With rollout-level dispatch and ``dispatch.journal=true`` workers append each session to its step's
journal before they put it, beside the dumps of role ``rollout_tq``. The dispatcher of the next run
takes them (:mod:`rlskip.dispatch.sink`): a killed run resumes in mid-step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from omegaconf import DictConfig
from tensordict import TensorDict

from rlskip import keys as names
from rlskip.config.check import look_up
from rlskip.config.other_nodes import DispatchConfig, ReplayConfig
from rlskip.config.skip import VALIDATION_ROLE
from rlskip.dispatch import Session
from rlskip.dispatch.journal import JournalWriter
from rlskip.dispatch.sink import Journals, journal_identity
from rlskip.hosts.verl.facts import MODE_KEY, NEEDED, SAMPLER_KEY, verl_release
from rlskip.hosts.verl.handshake import refuse_unshared
from rlskip.jobs.records import job_id, leave_token
from rlskip.keys import TRAIN, VAL, TrajectoryKey, uid_of
from rlskip.queue import PromptOutcome, ReplayBuffer, TransferQueueAdapter, to_rows
from rlskip.queue.protocol import Fields, Tags, TrajectoryQueue
from rlskip.skip import SkipManager

ROLE = "rollout_tq"

#: The session that runs in the present task.
running: ContextVar[Session] = ContextVar("rlskip_running")

# Those of the trainer in this process.
_journals: Journals | None = None


# -- what enters the queue ---------------------------------------------------------------------


run_queue = functools.cache(TransferQueueAdapter)
"""The run's queue; this process joins it on the first call."""


class StatusQueue(TransferQueueAdapter):
    """The run's queue for groups that are replayed: finished by the status of their prompts.

    verl's own buffer knows no other model, and takes every key but a prompt's for a row. So this
    leaves out the markers of groups that were counted.
    """

    def put(
        self, keys: Sequence[str], partition: str, fields: Fields = None, tags: Tags = None
    ) -> None:
        if fields is None and tags is not None:
            roots = {k: dict(tag) for k, tag in zip(keys, tags, strict=True) if uid_of(k) is None}
            for tag in roots.values():
                if (n := tag.pop(names.N, None)) is not None:
                    tag |= {names.STATUS: names.FINISHED, names.EXPECTED_ROLLOUTS: n}
            keys, tags = list(roots), list(roots.values())
        if keys:
            super().put(keys, partition, fields, tags)


class AttemptKeys:
    """The module `transfer_queue` for a worker, which does not know about attempts.

    Keys and tags get the present attempt: a late write of one that was given up does not replace
    the rows of the attempt that counts. Rows are first added to the `journal`, if there is one.
    """

    def __init__(self, inner: Any, journal: JournalWriter | None = None) -> None:
        self._inner = inner
        self._journal = journal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def async_kv_batch_put(
        self, keys: Sequence[str], fields: TensorDict, tags: Sequence[dict[str, Any]], **more: Any
    ) -> Any:
        session = running.get()
        attempt = session.attempt
        if self._journal is not None:
            await self._journal.add(session, to_rows(fields), [*map(dict, tags)])
        return await self._inner.async_kv_batch_put(
            keys=[
                str(TrajectoryKey.of_attempt(row.uid, row.session_id, row.index, attempt))
                for row in map(TrajectoryKey.parse, keys)
            ],
            fields=fields,
            tags=[{**tag, names.ATTEMPT: attempt} for tag in tags],
            **more,
        )


# -- what samples and evicts -------------------------------------------------------------------


def observed(sample: Callable[..., Any], queue: Callable[..., Any]) -> dict[str, Any]:
    """A buffer's `sample` by partition, as a stage whose result the partition's role dumps."""
    return {
        partition: SkipManager.annotate(role, stage="verl.sample", phase="sample", queue=queue)(
            sample
        )
        for partition, role in ((TRAIN, ROLE), (VAL, VALIDATION_ROLE))
    }


@SkipManager.annotate(ROLE, stage="verl.evict", phase="evict", queue=lambda *_: run_queue())
def evicted(batch: Any) -> Any:
    """Groups that a buffer is about to delete, for the dump."""
    return batch


_SAMPLE = observed(ReplayBuffer.sample, lambda *_: run_queue())


class FailClosedReplayBuffer:
    """A replay buffer for verl's V1 trainers that returns complete groups, or raises.

    verl makes it. `sampler_kwargs` holds all keys of `replay`, as rlskip's plug-in has put them
    there; `refill_fn` submits the given number of fresh prompts.
    """

    def __init__(
        self,
        *,
        trainer_mode: str,
        sampler_kwargs: Mapping[str, Any],
        refill_fn: Callable[[int], Any],
        **_: Any,
    ) -> None:
        settings = ReplayConfig(**{str(key): value for key, value in sampler_kwargs.items()})
        self._refill_fn = refill_fn
        # A sync step samples everything it submitted; with `drop`, everything that is left of it.
        self._whole_steps = trainer_mode == "sync" and settings.on_incomplete == "drop"
        self._buffer = ReplayBuffer(run_queue(), settings, refill=self._refill, on_evict=evicted)

    def sample(
        self, global_steps: int, partition_id: str, batch_size: int | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """A batch of verl's own type. verl deletes its rows; their markers are deleted here."""
        from transfer_queue import KVBatchMeta

        sample = _SAMPLE.get(partition_id, ReplayBuffer.sample)
        size = None if self._whole_steps else batch_size
        batch, metrics = sample(self._buffer, global_steps, partition_id, size)
        rows, uids = {*batch.keys}, {*batch.extra_info.pop(names.ROLLOUT_ROOT_KEYS)}
        there = run_queue().list(partition_id)
        left = [k for k in there if k not in rows and (k in uids or uid_of(k) in uids)]
        run_queue().delete(left, partition_id)
        if _journals is not None:
            _journals.tidy()
        return KVBatchMeta(**vars(batch)), metrics

    def get_sampleable_count(self, global_steps: int, partition_id: str) -> int:
        """The number of groups that could be sampled now."""
        return self._buffer.get_sampleable_count(global_steps, partition_id)

    def _refill(self, partition_id: str, evicted: list[PromptOutcome]) -> list[str]:
        """Have the trainer submit as many fresh prompts; returns their uids: the new roots."""
        before = {*run_queue().list(partition_id)}
        self._refill_fn(len(evicted))
        listing = run_queue().list(partition_id)
        return [
            key for key, tag in listing.items() if tag.get(names.IS_PROMPT) and key not in before
        ]


# -- journals ----------------------------------------------------------------------------------


def start_journals(
    config: DictConfig, dispatch: DispatchConfig, queue: TrajectoryQueue
) -> Journals | None:
    """The journals of the run; None if it has none.

    verl sets the weights of step s - 1 before it submits a batch of step s. A sync trainer resumes
    sessions of these weights only; an asynchronous one those that its sampler would not call stale.
    """
    global _journals
    _journals = None
    if dispatch.journal:
        role: Any = SkipManager.skip_instances[ROLE]
        needed = {f"config.{key}": look_up(config, key) for key in NEEDED}
        made = {"stage": "verl.submit", "verl": verl_release(), **needed}
        identity = journal_identity(role.dumps.identities.conditions.adding(made), dispatch)
        kwargs = look_up(config, f"{SAMPLER_KEY}.sampler_kwargs")  # of rlskip's buffer
        ages = kwargs.max_off_policy_strategy != "none"
        span = kwargs.max_off_policy_threshold if ages else None
        span = 1 if look_up(config, MODE_KEY) == "sync" else span
        _journals = Journals(role.dumps.store, identity, queue, max_span=span)
    return _journals


def sharing() -> Callable[[], None] | None:
    """What each worker that journals calls first: it raises where the directory is another one.

    None if this process cannot leave a token there.
    """
    dump_dir = str(SkipManager.skip_instances[ROLE].local_config.dump_dir)
    if not leave_token(dump_dir, ROLE):
        return None
    key = f"skip.{ROLE}.dump_dir (dispatch.journal)"
    return functools.partial(refuse_unshared, key, dump_dir, job_id(), ROLE)
