"""The run's TransferQueue as this process reaches it, and a view of it for verl's own buffer."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tensordict import TensorDict

from rlskip.keys import EXPECTED_ROLLOUTS, FINISHED, STATUS, N, uid_of
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

    :meth:`put` writes prompts without data as :func:`with_status` has them, and leaves out other
    keys without data.
    """

    def put(
        self,
        keys: Sequence[str],
        partition: str,
        fields: TensorDict | Sequence[Row] | None = None,
        tags: Sequence[Tag] | None = None,
    ) -> KVBatchMeta:
        if fields is None and tags is not None:
            prompts = with_status(keys, tags)
            if not prompts:
                return KVBatchMeta(partition_id=partition)
            keys, tags = list(prompts), list(prompts.values())
        return super().put(keys, partition, fields, tags)


def with_status(keys: Sequence[str], tags: Sequence[Tag]) -> dict[str, Tag]:
    """The prompts among `keys`, each with a tag that verl's own buffer understands.

    A dump made under rollout-level dispatch has prompts that are ready once their markers are
    counted. They become finished ones: only complete groups are replayed.
    """
    counted = (N, EXPECTED_ROLLOUTS)
    prompts = {key: tag for key, tag in zip(keys, tags, strict=True) if uid_of(key) is None}
    return {
        key: {**{k: v for k, v in tag.items() if k not in counted}, STATUS: FINISHED}
        if N in tag
        else tag
        for key, tag in prompts.items()
    }
