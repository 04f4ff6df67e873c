"""The run's TransferQueue as this process reaches it, and a view of it for verl's own buffer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict

from rlskip.keys import (
    EXPECTED_ROLLOUTS,
    FINISHED,
    ROLLOUT_N,
    STATUS,
    N,
    uid_of,
)
from rlskip.queue import KVBatchMeta, Row, Tag, TrajectoryQueue, TransferQueueAdapter, Watch


@functools.cache
def run_queue() -> TransferQueueAdapter:
    """The run's queue; this process joins it on the first call."""
    return TransferQueueAdapter()


def expect_sessions(prompts: TensorDict, partition: str) -> None:
    """Write to the prompts' roots how many sessions each gets, if `prompts` have such a field."""
    if ROLLOUT_N in prompts.keys():  # noqa: SIM118 - a TensorDict
        uids = list(map(str, prompts.get("uid").tolist()))
        numbers = [{EXPECTED_ROLLOUTS: int(n)} for n in prompts.get(ROLLOUT_N).tolist()]
        run_queue().put(uids, partition, tags=numbers)


class StatusQueue(TrajectoryQueue):
    """A queue for verl's own buffer, to which prompts have a status and every other key is a row.

    A dump made under rollout-level dispatch holds markers, and prompts that are ready once their
    markers are counted. :meth:`put` writes such a prompt as finished (only complete groups are
    replayed) and leaves out keys that have a tag and no data.
    """

    def __init__(self, inner: TrajectoryQueue) -> None:
        self._inner = inner

    def put(
        self,
        keys: Sequence[str],
        partition: str,
        fields: TensorDict | Sequence[Row] | None = None,
        tags: Sequence[Tag] | None = None,
    ) -> KVBatchMeta:
        if fields is None and tags is not None:
            prompts = {
                key: _with_status(tag)
                for key, tag in zip(keys, tags, strict=True)
                if uid_of(key) is None
            }
            if not prompts:
                return KVBatchMeta(partition_id=partition)
            keys, tags = list(prompts), list(prompts.values())
        return self._inner.put(keys, partition, fields, tags)

    def get(
        self, keys: Sequence[str], partition: str, fields: Sequence[str] | None = None
    ) -> TensorDict:
        return self._inner.get(keys, partition, fields)

    def list(self, partition: str) -> dict[str, dict[str, Any]]:
        return self._inner.list(partition)

    def delete(self, keys: Sequence[str], partition: str) -> None:
        self._inner.delete(keys, partition)

    def watch(self) -> Watch:
        return self._inner.watch()


def _with_status(tag: Tag) -> Tag:
    if N not in tag:
        return tag
    counted = (N, EXPECTED_ROLLOUTS)
    return {**{k: v for k, v in tag.items() if k not in counted}, STATUS: FINISHED}
