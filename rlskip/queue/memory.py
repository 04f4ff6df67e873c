"""The embedded queue: one process, any number of threads; every change wakes its reader."""

from __future__ import annotations

import threading
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

    Values are copied on the way in and on the way out. A change wakes a waiting reader, and the
    cost of a watch depends on what changed, not on what the queue holds.
    """

    # `_changed` is held whenever the state below is read or written. A key is noted before it
    # changes. A put makes a new tag and a new row, so those that a reader holds never change.

    def __init__(self) -> None:
        self._partitions: dict[str, dict[str, tuple[Tag, Row]]] = {}
        self._changed = threading.Condition()
        # What the watch has not polled yet: by partition, each key and whether it existed at the
        # last poll. One that did not and was deleted again is forgotten, so that a watch that
        # nobody polls does not grow.
        self._noted: dict[str, dict[str, bool]] = {}

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
            noted = self._noted.setdefault(partition, {})
            for key, row, tag in zip(keys, rows, tags, strict=True):
                noted.setdefault(key, key in held)
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
            noted = self._noted.setdefault(partition, {})
            for key in keys:
                if held.pop(key, None) is not None and not noted.setdefault(key, True):
                    del noted[key]
            self._changed.notify_all()

    def watch(self) -> Watch:
        with self._changed:
            self._noted = {
                name: dict.fromkeys(held, False) for name, held in self._partitions.items()
            }
        return _MemoryWatch(self)

    def __reduce__(self) -> Any:
        raise RlskipError(
            "a MemoryQueue belongs to one process and cannot be sent to another",
            remedy="use TransferQueueAdapter between processes",
        )


class _MemoryWatch(Watch):
    def __init__(self, queue: MemoryQueue) -> None:
        self._queue = queue

    def poll(self) -> Changes:
        queue = self._queue
        with queue._changed:
            noted, queue._noted = queue._noted, {}
            changes: Changes = {}
            for partition, keys in noted.items():
                if keys:
                    held = queue._partitions.get(partition, {})
                    changes[partition] = {k: held[k][0] if k in held else None for k in keys}
            return changes

    def wait_change(self, timeout: float) -> None:
        queue = self._queue
        with queue._changed:
            queue._changed.wait_for(lambda: any(queue._noted.values()), timeout)
