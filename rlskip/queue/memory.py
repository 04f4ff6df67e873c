"""The embedded queue: one process, any number of threads; every change wakes its readers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Sequence
from itertools import chain as flatten
from typing import Any

import attrs
from tensordict import TensorDict

from rlskip.batch.columns import own
from rlskip.errors import RlskipError
from rlskip.queue.protocol import (
    Changes,
    KVBatchMeta,
    MissingKeysError,
    Row,
    Tag,
    TrajectoryQueue,
    Watch,
    check_put,
)
from rlskip.queue.rows import OwnRow, check_fields, one_batch, to_rows


@attrs.frozen
class _Entry:
    """A key's tag and row. A put makes a new entry, so the one a reader holds never changes."""

    tag: Tag
    row: Row


class MemoryQueue(TrajectoryQueue):
    """A trajectory queue inside this process.

    Values are copied on the way in and on the way out. A change wakes waiting readers, and the
    cost of a watch depends on what changed, not on what the queue holds.
    """

    # `_changed` is held whenever the state below, or that of a watch, is read or written. No
    # partition is empty. Every watch notes a key before the key changes.

    def __init__(self) -> None:
        self._partitions: dict[str, dict[str, _Entry]] = {}
        self._changed = threading.Condition()
        self._watches: weakref.WeakSet[_MemoryWatch] = weakref.WeakSet()

    def put(
        self,
        keys: Sequence[str],
        partition: str,
        fields: TensorDict | Sequence[Row] | None = None,
        tags: Sequence[Tag] | None = None,
    ) -> KVBatchMeta:
        check_put(keys, fields, tags)
        if fields is None:
            rows: Sequence[Row] = [{}] * len(keys)
        elif all(type(row) is OwnRow for row in fields):
            rows = fields  # type: ignore[assignment]
        else:
            rows = own(to_rows(fields))
        tags = [{}] * len(keys) if tags is None else tags
        with self._changed:
            held = self._partitions.setdefault(partition, {})
            watches = tuple(self._watches)
            for key, row, tag in zip(keys, rows, tags, strict=True):
                old = held.get(key)
                for watch in watches:
                    watch.note(partition, key, existed=old is not None)
                held[key] = _Entry(
                    {**old.tag, **tag} if old else {**tag}, {**old.row, **row} if old else {**row}
                )
            entries = [held[key] for key in keys]
            self._changed.notify_all()
        return KVBatchMeta(
            keys=list(keys),
            tags=[dict(entry.tag) for entry in entries],
            partition_id=partition,
            fields=[*_common_fields([entry.row for entry in entries])],
        )

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
            rows = {} if missing else {key: held[key].row for key in keys}
        if missing:
            raise MissingKeysError.of_keys(missing, partition)
        if not all(rows.values()):  # these it names
            check_fields(rows, f"partition {partition!r}")
        if fields is not None:
            there = {*flatten(*rows.values())} if fill_missing else {*_common_fields(rows.values())}
            if not there.issuperset(fields):
                raise MissingKeysError.of_fields(fields, sorted(there), partition)
            rows = {key: {n: row[n] for n in fields if n in row} for key, row in rows.items()}
        return one_batch(rows, partition, fill_missing)

    def list(self, partition: str) -> dict[str, dict[str, Any]]:
        with self._changed:
            entries = dict(self._partitions.get(partition, {}))
        return {key: dict(entry.tag) for key, entry in entries.items()}

    def delete(self, keys: Sequence[str], partition: str) -> None:
        with self._changed:
            held = self._partitions.get(partition, {})
            watches = tuple(self._watches)
            for key in keys:
                if held.pop(key, None) is not None:
                    for watch in watches:
                        watch.note_gone(partition, key)
            if not held:
                self._partitions.pop(partition, None)
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

    # A key is noted from its first change after a poll on. One that did not exist at that poll and
    # does not exist now is not noted.

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
                    changes[partition] = {k: held[k].tag if k in held else None for k in keys}
            return changes

    def wait_change(self, timeout: float) -> None:
        with self._queue._changed:
            self._queue._changed.wait_for(lambda: any(self._changes.values()), timeout)


def _common_fields(rows: Collection[Row]) -> dict[str, None]:
    """The fields that every row holds, in the order of the first."""
    first = next(iter(rows), {})
    return dict.fromkeys(name for name in first if all(name in row for row in rows))
