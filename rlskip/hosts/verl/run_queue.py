"""The run's TransferQueue, and the journals of what enters it: a killed run resumes in mid-step.

verl's agent-loop worker writes a session's rows to the module `transfer_queue` as
``verl.trainer.ppo.v1.agent_loop_tq`` sees it, and does not know about attempts. That seam gets
:class:`AttemptKeys`, without which a late write of an attempt that was given up would replace the
rows of the attempt that counts.

With rollout-level dispatch and ``dispatch.journal=true`` workers append each session to its step's
journal before. The dispatcher of the next run takes them (:mod:`rlskip.dispatch.resume`). Journals
are beside the dumps of role ``rollout_tq``, and hold what the role compares. A session also depends
on verl's release and on what its rows must have (log-probs, say).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from omegaconf import DictConfig
from tensordict import TensorDict

from rlskip.config.check import look_up
from rlskip.config.dispatch import DispatchConfig
from rlskip.dispatch import Session
from rlskip.dispatch.resume import Journals, WorkerJournal, journal_identity
from rlskip.hosts.verl.facts import MODE_KEY, NEEDED, SAMPLER_KEY, verl_release
from rlskip.hosts.verl.handshake import leave_token, refuse_unshared
from rlskip.jobs.records import job_id
from rlskip.keys import ATTEMPT, FINISHED, STATUS, N, TrajectoryKey, uid_of
from rlskip.queue import KVBatchMeta, Row, Tag, TrajectoryQueue, TransferQueueAdapter, to_rows
from rlskip.skip import SkipManager
from rlskip.skip.rollout_tq import GroupRole

_ROLE = "rollout_tq"

#: The session that runs in the present task.
running: ContextVar[Session] = ContextVar("rlskip_running")

# Those of the trainer in this process.
_journals: Journals | None = None


@functools.cache
def run_queue() -> TransferQueueAdapter:
    """The run's queue; this process joins it on the first call."""
    return TransferQueueAdapter()


@functools.cache
def status_queue() -> TransferQueueAdapter:
    """The same for verl's own buffer."""
    return StatusQueue()


class StatusQueue(TransferQueueAdapter):
    """The run's queue for verl's own buffer, which takes every key but a prompt's for a row.

    A dump made under rollout-level dispatch has prompts that are ready once their markers are
    counted. As only complete groups are replayed, :meth:`put` writes these prompts as finished,
    and leaves the markers out.
    """

    def put(
        self,
        keys: Sequence[str],
        partition: str,
        fields: TensorDict | Sequence[Row] | None = None,
        tags: Sequence[Tag] | None = None,
    ) -> KVBatchMeta:
        if fields is None and tags is not None:
            prompts = {
                key: {**tag, STATUS: FINISHED} if tag.pop(N, None) else tag
                for key, tag in zip(keys, map(dict, tags), strict=True)
                if uid_of(key) is None
            }
            if not prompts:
                return KVBatchMeta(partition_id=partition)
            keys, tags = list(prompts), list(prompts.values())
        return super().put(keys, partition, fields, tags)


class AttemptKeys:
    """The module `transfer_queue`, with the present attempt in keys and tags of batches put.

    Where there is a `journal`, rows are journaled before they are put.
    """

    def __init__(self, inner: Any, journal: WorkerJournal | None = None) -> None:
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
            tags=[{**tag, ATTEMPT: attempt} for tag in tags],
            **more,
        )


# -- journals --------------------------------------------------------------------------------


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
        role = SkipManager.skip_instances[_ROLE]
        assert isinstance(role, GroupRole)
        needed = {f"config.{key}": look_up(config, key) for key in NEEDED}
        made = {"stage": "verl.submit", "verl": verl_release(), **needed}
        identity = journal_identity(role.dumps.identities.conditions.adding(made), dispatch)
        kwargs = look_up(config, f"{SAMPLER_KEY}.sampler_kwargs")  # of rlskip's buffer
        span: int | None = kwargs.max_off_policy_threshold
        if look_up(config, MODE_KEY) == "sync":
            span = 1
        elif kwargs.max_off_policy_strategy == "none":
            span = None
        _journals = Journals(role.dumps.store, identity, queue, max_span=span)
    return _journals


def tidy_journals() -> None:
    """Remove the journals that are done with."""
    if _journals is not None:
        _journals.tidy()


def sharing() -> Callable[[], None] | None:
    """What each worker that journals calls first, wherever Ray has placed it.

    It raises :class:`ConfigError` where the directory is another one than in this process. None
    if this process cannot leave a token there.
    """
    dump_dir = str(SkipManager.skip_instances[_ROLE].local_config.dump_dir)
    if not leave_token(dump_dir, _ROLE):
        return None
    key = f"skip.{_ROLE}.dump_dir (dispatch.journal)"
    return functools.partial(refuse_unshared, key, dump_dir, job_id(), _ROLE)
