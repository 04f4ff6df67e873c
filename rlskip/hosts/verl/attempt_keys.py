"""Rows that verl's agent-loop workers write, under the keys of the attempt that writes them.

The seam is the module `transfer_queue` as ``verl.trainer.ppo.v1.agent_loop_tq`` sees it: verl's
worker writes a session's rows there, and does not know about attempts. Without this, a late write
of an attempt that was given up would replace the rows of the attempt that counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from tensordict import TensorDict

from rlskip.dispatch import Session
from rlskip.dispatch.resume import WorkerJournal
from rlskip.keys import ATTEMPT, TrajectoryKey
from rlskip.queue import to_rows

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
