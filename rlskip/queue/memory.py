"""The embedded queue: one process, any number of threads; every change wakes its readers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict

from rlskip.batch.columns import own
from rlskip.errors import RlskipError
from rlskip.queue.protocol import (
    Changes,
    Fields,
    MissingKeysError,
    Row,
    Tag,
    Tags,
    TrajectoryQueue,
    Watch,
    check_put,
)
from rlskip.queue.rows import OwnRow, one_batch, to_rows


class MemoryQueue(TrajectoryQueue):
    """A trajectory queue inside this process.

    Values are copied on the way in and on the way out. A change wakes waiting readers, and the
    cost of a watch depends on what changed, not on what the queue holds.
    """

    # `_changed` is held whenever the state below, or that of a watch, is read or written. Every
    # watch notes a key before the key changes. A put makes a new tag and a new row, so those that
    # a reader holds never change.

    def __init__(self) -> None:
        self._partitions: dict[str, dict[str, tuple[Tag, Row]]] = {}
        self._changed = threading.Condition()
        self._watches: weakref.WeakSet[_MemoryWatch] = weakref.WeakSet()

    def put(
        self, keys: Sequence[str], partition: str, fields: Fields = None, tags: Tags = None
    ) -> None:
        check_put(keys, fields, tags)
        rows: Sequence[Row] = [{}] * len(keys)
        if fields is not None:
            is_own = all(type(row) is OwnRow for row in fields)
            rows = fields if is_own else own(to_rows(fields))
        tags = [{}] * len(keys) if tags is None else tags
        with self._changed:
            held = self._partitions.setdefault(partition, {})
            watches = tuple(self._watches)
            for key, row, tag in zip(keys, rows, tags, strict=True):
                for watch in watches:
                    watch.note(partition, key, existed=key in held)
                old_tag, old_row = held.get(key, ({}, {}))
                held[key] = {**old_tag, **tag}, {**old_row, **row}
            self._changed.notify_all()

    def get(
        self,
        keys: Sequence[str],
        partition: str,
        fields: Sequence[str] | None = None,
        *,
        fill_missing: bool = False,
    ) -> TensorDict:
        with self._changed:
            held = self._partitions.get(partition, {})
            missing = [key for key in keys if key not in held]
            rows = {} if missing else {key: held[key][1] for key in keys}
        if missing:
            raise MissingKeysError.of_keys(missing, partition)
        return one_batch(rows, partition, fill_missing, fields=fields)

    def list(self, partition: str) -> dict[str, dict[str, Any]]:
        with self._changed:
            entries = dict(self._partitions.get(partition, {}))
        return {key: dict(tag) for key, (tag, _) in entries.items()}

    def delete(self, keys: Sequence[str], partition: str) -> None:
        with self._changed:
            held = self._partitions.get(partition, {})
            for key in keys:
                if held.pop(key, None) is not None:
                    for watch in self._watches:
                        watch.note_gone(partition, key)
            self._changed.notify_all()

    def watch(self) -> Watch:
        with self._changed:
            watch = _MemoryWatch(self)
            for partition, held in self._partitions.items():
                for key in held:
                    watch.note(partition, key, existed=False)
            self._watches.add(watch)
        return watch

    def __reduce__(self) -> Any:
        raise RlskipError(
            "a MemoryQueue belongs to one process and cannot be sent to another",
            remedy="use TransferQueueAdapter between processes",
        )


class _MemoryWatch(Watch):
    """Collects, under the queue's lock, the keys that changed since the last poll.

    A key put and deleted between two polls is forgotten, so an idle watch never holds more keys
    than the queue held at the last poll and holds now.
    """

    def __init__(self, queue: MemoryQueue) -> None:
        self._queue = queue
        # partition -> key -> whether it existed at the last poll
        self._changes: dict[str, dict[str, bool]] = {}

    def note(self, partition: str, key: str, existed: bool) -> None:
        self._changes.setdefault(partition, {}).setdefault(key, existed)

    def note_gone(self, partition: str, key: str) -> None:
        keys = self._changes.setdefault(partition, {})
        if keys.setdefault(key, True) is False:
            del keys[key]

    def poll(self) -> Changes:
        with self._queue._changed:
            noted, self._changes = self._changes, {}
            changes: Changes = {}
            for partition, keys in noted.items():
                if keys:
                    held = self._queue._partitions.get(partition, {})
                    changes[partition] = {k: held[k][0] if k in held else None for k in keys}
            return changes

    def wait_change(self, timeout: float) -> None:
        with self._queue._changed:
            self._queue._changed.wait_for(lambda: any(self._changes.values()), timeout)
