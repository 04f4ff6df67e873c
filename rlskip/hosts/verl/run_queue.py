"""The run's TransferQueue as this process reaches it, and a view of it for verl's own buffer."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tensordict import TensorDict

from rlskip.keys import FINISHED, STATUS, N, uid_of
from rlskip.queue import KVBatchMeta, Row, Tag, TransferQueueAdapter


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
