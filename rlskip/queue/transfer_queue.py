"""The same protocol on TransferQueue, for sessions in other processes and on other nodes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import NonTensorData, TensorDict

from rlskip.queue.base import (
    Changes,
    KVBatchMeta,
    MissingKeysError,
    QueueUnavailableError,
    Row,
    Tag,
    TrajectoryQueue,
    Watch,
    check_put,
)
from rlskip.queue.rows import to_batch, to_rows

Listing = Mapping[str, Mapping[str, Tag]]


class TransferQueueAdapter(TrajectoryQueue):
    """TransferQueue's key-value interface (0.1.10 and later) as a trajectory queue.

    It joins the TransferQueue of the running Ray cluster, or starts one, exactly as
    ``transfer_queue.init(conf)`` does. Sent to a Ray task or actor, it joins from there.

    TransferQueue tells nobody of a change, and it lists everything or nothing: a watch asks
    again and again, less often the longer nothing happens.

    Parameters
    ----------
    conf
        For ``transfer_queue.init``; only the process that starts it is heard.
    min_poll_s, max_poll_s
        Seconds between two listings, right after a change and when all is quiet.

    Raises
    ------
    QueueUnavailableError
        TransferQueue or Ray is not installed, or Ray is not running.
    """

    def __init__(
        self, conf: Any = None, *, min_poll_s: float = 0.005, max_poll_s: float = 0.5
    ) -> None:
        self._poll_s = (min_poll_s, max_poll_s)
        self._tq = _transfer_queue()
        self._tq.init(conf)

    def __reduce__(self) -> Any:
        return _join, self._poll_s

    def put(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: TensorDict | Sequence[Row] | None = None,
        tags: Sequence[Tag] | None = None,
    ) -> KVBatchMeta:
        check_put(keys, fields, tags)
        meta = self._tq.kv_batch_put(
            keys=list(keys),
            partition_id=partition_id,
            fields=None if fields is None else _as_batch(fields),
            tags=None if tags is None else [dict(tag) for tag in tags],
        )
        return KVBatchMeta(meta.keys, meta.tags, meta.partition_id, meta.fields, meta.extra_info)

    def get(
        self, keys: Sequence[str], partition_id: str, fields: Sequence[str] | None = None
    ) -> TensorDict:
        if not keys:
            return to_batch([])
        select = None if fields is None else list(fields)
        try:
            data = self._tq.kv_batch_get(list(keys), partition_id, select_fields=select)
        except ValueError as error:
            raise self._missing(keys, partition_id, fields) from error
        # TransferQueue leaves out, with a warning, what it does not hold.
        if len(data) < len(keys) or not set(fields or ()) <= set(data.keys()):
            raise self._missing(keys, partition_id, fields, list(data.keys()))
        return data

    def list(self, partition_id: str) -> dict[str, dict[str, Any]]:
        listing: dict[str, dict[str, dict[str, Any]]] = self._tq.kv_list(partition_id)
        return listing.get(partition_id, {})

    def clear(self, keys: Sequence[str], partition_id: str) -> None:
        if keys:
            self._tq.kv_clear(list(keys), partition_id)

    def watch(self) -> Watch:
        return _PollingWatch(self._tq, *self._poll_s)

    def _missing(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: Sequence[str] | None,
        held: Sequence[str] = (),
    ) -> MissingKeysError:
        there = self.list(partition_id)
        missing = [key for key in keys if key not in there]
        if missing:
            return MissingKeysError.of_keys(missing, partition_id)
        return MissingKeysError.of_fields(fields or (), held, partition_id)


class _PollingWatch(Watch):
    """Compares each full listing with the one before it."""

    def __init__(self, transfer_queue: Any, min_poll_s: float, max_poll_s: float) -> None:
        self._tq = transfer_queue
        self._min_s, self._max_s = min_poll_s, max_poll_s
        self._pause_s = min_poll_s
        self._listing: Listing = {}
        self._lock = threading.Lock()

    def changes(self) -> Changes:
        with self._lock:
            before, self._listing = self._listing, self._tq.kv_list()
            changes = difference(before, self._listing)
            self._pause_s = self._min_s if changes else min(2 * self._pause_s, self._max_s)
        return changes

    def wait_change(self, timeout: float) -> None:
        time.sleep(min(self._pause_s, timeout))

    async def await_change(self, timeout: float) -> None:
        await asyncio.sleep(min(self._pause_s, timeout))


def difference(before: Listing, now: Listing) -> Changes:
    """What to report to one who knows the listing `before` and finds `now`."""
    changes: Changes = {}
    for partition_id in before.keys() | now.keys():
        old, new = before.get(partition_id, {}), now.get(partition_id, {})
        changed: dict[str, Tag | None] = dict(new)
        if old:
            changed = {key: tag for key, tag in new.items() if old.get(key) != tag}
            added = sum(key not in old for key in changed)
            if len(old) + added > len(new):  # else nothing is gone, and no need to look for it
                changed.update(dict.fromkeys(old.keys() - new.keys()))
        if changed:
            changes[partition_id] = changed
    return changes


def _as_batch(fields: TensorDict | Sequence[Row]) -> TensorDict:
    """As TransferQueue takes it: a TensorDict, every field of it one value per row."""
    if isinstance(fields, TensorDict) and not any(
        isinstance(value, NonTensorData) for value in fields.values()
    ):
        return fields
    return to_batch(to_rows(fields))


def _join(min_poll_s: float, max_poll_s: float) -> TransferQueueAdapter:
    return TransferQueueAdapter(min_poll_s=min_poll_s, max_poll_s=max_poll_s)


def _transfer_queue() -> Any:
    try:
        import ray
        import transfer_queue
    except ImportError as error:
        raise QueueUnavailableError(
            f"TransferQueueAdapter needs {error.name}", remedy="pip install 'rlskip[ray]'"
        ) from error
    if not ray.is_initialized():
        raise QueueUnavailableError(
            "TransferQueueAdapter runs on Ray, and Ray is not running in this process",
            remedy="call ray.init() first",
        )
    return transfer_queue
