"""The run's TransferQueue: as this process reaches it, for verl's own buffer, and for workers.

verl's agent-loop worker writes a session's rows to the module `transfer_queue` as
``verl.trainer.ppo.v1.agent_loop_tq`` sees it, and does not know about attempts. That seam gets
:class:`AttemptKeys`, without which a late write of an attempt that was given up would replace the
rows of the attempt that counts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from tensordict import TensorDict

from rlskip.dispatch import Session
from rlskip.dispatch.resume import WorkerJournal
from rlskip.keys import ATTEMPT, FINISHED, STATUS, N, TrajectoryKey, uid_of
from rlskip.queue import Row, Tag, TransferQueueAdapter, to_rows


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
    ) -> None:
        if fields is None and tags is not None:
            prompts = {
                key: {**tag, STATUS: FINISHED} if tag.pop(N, None) else tag
                for key, tag in zip(keys, map(dict, tags), strict=True)
                if uid_of(key) is None
            }
            if not prompts:
                return
            keys, tags = list(prompts), list(prompts.values())
        super().put(keys, partition, fields, tags)


#: The session that runs in the present task.
running: ContextVar[Session] = ContextVar("rlskip_running")


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
