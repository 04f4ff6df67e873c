"""The queue protocol on TransferQueue, for sessions in other processes and on other nodes."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import NonTensorData, TensorDict

from rlskip.keys import attempt_of, is_own_key
from rlskip.queue.protocol import (
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
    ``transfer_queue.init(conf)`` does. An adapter sent to a Ray task or actor joins from there.

    TransferQueue does not report changes, and it lists either everything or nothing. A watch
    therefore polls, less often the longer nothing changes.

    Parameters
    ----------
    conf
        The argument of ``transfer_queue.init``, used only by the process that starts it.
    min_poll_s, max_poll_s
        Seconds between two listings: right after a change, and after a long quiet time.

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
        low, high = self._poll_s
        return functools.partial(TransferQueueAdapter, min_poll_s=low, max_poll_s=high), ()

    def put(
        self,
        keys: Sequence[str],
        partition: str,
        fields: TensorDict | Sequence[Row] | None = None,
        tags: Sequence[Tag] | None = None,
    ) -> KVBatchMeta:
        check_put(keys, fields, tags)
        if fields is not None and tags is not None:
            self._delete_earlier_attempts(keys, partition, tags)
        meta = self._tq.kv_batch_put(
            keys=list(keys),
            partition_id=partition,
            fields=None if fields is None else _as_batch(fields),
            tags=None if tags is None else [dict(tag) for tag in tags],
        )
        return KVBatchMeta(meta.keys, meta.tags, meta.partition_id, meta.fields, meta.extra_info)

    def get(
        self, keys: Sequence[str], partition: str, fields: Sequence[str] | None = None
    ) -> TensorDict:
        if not keys:
            return to_batch([])
        select = None if fields is None else list(fields)
        try:
            data = self._tq.kv_batch_get(list(keys), partition, select_fields=select)
        except ValueError as error:
            raise self._missing(keys, partition, fields) from error
        # TransferQueue logs a warning for missing keys and returns a shorter batch.
        if len(data) < len(keys) or not set(fields or ()) <= set(data.keys()):
            raise self._missing(keys, partition, fields, list(data.keys()))
        return data

    def list(self, partition: str) -> dict[str, dict[str, Any]]:
        listing: dict[str, dict[str, dict[str, Any]]] = self._tq.kv_list(partition)
        return listing.get(partition, {})

    def delete(self, keys: Sequence[str], partition: str) -> None:
        if keys:
            self._tq.kv_clear(list(keys), partition)

    def watch(self) -> Watch:
        return PollingWatch(self._tq, *self._poll_s)

    def _delete_earlier_attempts(
        self, keys: Sequence[str], partition: str, tags: Sequence[Tag]
    ) -> None:
        """Delete these rows of earlier attempts, whose fields TransferQueue would merge in."""
        # Most attempts have their own keys, which no other attempt uses.
        shared = {
            key: attempt
            for key, tag in zip(keys, tags, strict=True)
            if (attempt := attempt_of(tag)) and not is_own_key(key, attempt)
        }
        if shared:
            there = self.list(partition)
            earlier = [k for k, n in shared.items() if k in there and attempt_of(there[k]) != n]
            self.delete(earlier, partition)

    def _missing(
        self,
        keys: Sequence[str],
        partition: str,
        fields: Sequence[str] | None,
        held: Sequence[str] = (),
    ) -> MissingKeysError:
        there = self.list(partition)
        missing = [key for key in keys if key not in there]
        if missing:
            return MissingKeysError.of_keys(missing, partition)
        return MissingKeysError.of_fields(fields or (), held, partition)


class PollingWatch(Watch):
    """Compares each full listing with the previous one."""

    # `_listing` is what the last poll saw. Polls run one after the other, so that each change is
    # reported to one caller; a wait needs no lock, because it only reads `_pause_s`.

    def __init__(self, transfer_queue: Any, min_poll_s: float, max_poll_s: float) -> None:
        self._tq = transfer_queue
        self._min_s, self._max_s = min_poll_s, max_poll_s
        self._pause_s = min_poll_s
        self._listing: Listing = {}
        self._lock = threading.Lock()

    def poll(self) -> Changes:
        with self._lock:
            before, self._listing = self._listing, self._tq.kv_list()
            changes = difference(before, self._listing)
            self._pause_s = self._min_s if changes else min(2 * self._pause_s, self._max_s)
        return changes

    def wait_change(self, timeout: float) -> None:
        time.sleep(min(self._pause_s, timeout))


def difference(before: Listing, now: Listing) -> Changes:
    """Return the changes between two listings."""
    changes: Changes = {}
    for partition in before.keys() | now.keys():
        old, new = before.get(partition, {}), now.get(partition, {})
        changed: dict[str, Tag | None] = dict(new)
        if old:
            changed = {key: tag for key, tag in new.items() if old.get(key) != tag}
            added = sum(key not in old for key in changed)
            if len(old) + added > len(new):  # else no key is gone
                changed.update(dict.fromkeys(old.keys() - new.keys()))
        if changed:
            changes[partition] = changed
    return changes


def _as_batch(fields: TensorDict | Sequence[Row]) -> TensorDict:
    """Convert to what TransferQueue takes: a TensorDict with one value per row in each field."""
    if isinstance(fields, TensorDict) and not any(
        isinstance(value, NonTensorData) for value in fields.values()
    ):
        return fields
    return to_batch(to_rows(fields))


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
