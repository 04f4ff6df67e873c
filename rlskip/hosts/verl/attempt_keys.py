"""Rows that verl's agent-loop workers write, under the keys of the attempt that writes them.

The seam is the module `transfer_queue` as ``verl.trainer.ppo.v1.agent_loop_tq`` sees it: verl's
worker writes a session's rows there, and does not know about attempts. Without this, a late write
of an attempt that was given up would replace the rows of the attempt that counts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any

from tensordict import TensorDict

from rlskip.keys import ATTEMPT, TrajectoryKey

#: The attempt that runs in the present task.
present_attempt: ContextVar[int] = ContextVar("rlskip_attempt", default=0)

BeforePut = Callable[[TensorDict, list[dict[str, Any]]], Awaitable[None]]


class AttemptKeys:
    """The module `transfer_queue`, with keys and tags of :data:`present_attempt` in batches put.

    `before_put` is called with the rows and the tags of a batch before it is put.
    """

    def __init__(self, inner: Any, before_put: BeforePut | None = None) -> None:
        self._inner = inner
        self._before_put = before_put

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def async_kv_batch_put(
        self, keys: Sequence[str], fields: TensorDict, tags: Sequence[dict[str, Any]], **more: Any
    ) -> Any:
        attempt = present_attempt.get()
        if self._before_put is not None:
            await self._before_put(fields, [dict(tag) for tag in tags])
        return await self._inner.async_kv_batch_put(
            keys=[
                str(TrajectoryKey.of_attempt(row.uid, row.session_id, row.index, attempt))
                for row in map(TrajectoryKey.parse, keys)
            ],
            fields=fields,
            tags=[{**tag, ATTEMPT: attempt} for tag in tags],
            **more,
        )
