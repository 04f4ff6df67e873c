"""The embedded queue: one process, any number of threads, woken by every change."""

from __future__ import annotations

import asyncio
import copy
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
from tensordict import TensorDict

from rlskip.errors import RlskipError
from rlskip.queue.base import (
    Changes,
    KVBatchMeta,
    MissingKeysError,
    Row,
    Tag,
    TrajectoryQueue,
    Watch,
    check_put,
)
from rlskip.queue.rows import to_batch, to_rows


@attrs.frozen
class _Entry:
    """A key's tag and row. A put makes a new one: what a reader holds never changes."""

    tag: Tag
    row: Row


_EMPTY = _Entry({}, {})


class MemoryQueue(TrajectoryQueue):
    """A trajectory queue inside this process.

    Values are copied on the way in and on the way out. Readers are woken by a condition
    variable, and a watch costs what changed, not what is there.
    """

    def __init__(self) -> None:
        self._partitions: dict[str, dict[str, _Entry]] = {}
        self._changed = threading.Condition()
        self._watches: weakref.WeakSet[_MemoryWatch] = weakref.WeakSet()

    def put(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: TensorDict | Sequence[Row] | None = None,
        tags: Sequence[Tag] | None = None,
    ) -> KVBatchMeta:
        check_put(keys, fields, tags)
        rows = [{}] * len(keys) if fields is None else [_own(row) for row in to_rows(fields)]
        tags = [{}] * len(keys) if tags is None else tags
        with self._changed:
            partition = self._partitions.setdefault(partition_id, {})
            watches = tuple(self._watches)
            for key, row, tag in zip(keys, rows, tags, strict=True):
                for watch in watches:
                    watch.note(partition_id, key, existed=key in partition)
                old = partition.get(key, _EMPTY)
                partition[key] = _Entry({**old.tag, **tag}, {**old.row, **row})
            entries = [partition[key] for key in keys]
            self._wake()
        return KVBatchMeta(
            keys=list(keys),
            tags=[dict(entry.tag) for entry in entries],
            partition_id=partition_id,
            fields=_common_fields(entries),
        )

    def get(
        self, keys: Sequence[str], partition_id: str, fields: Sequence[str] | None = None
    ) -> TensorDict:
        with self._changed:
            partition = self._partitions.get(partition_id, {})
            entries = [partition.get(key) for key in keys]
        found = [entry for entry in entries if entry is not None]
        if len(found) < len(keys):
            missing = [key for key, entry in zip(keys, entries, strict=True) if entry is None]
            raise MissingKeysError.of_keys(missing, partition_id)
        held = _common_fields(found)
        wanted = held if fields is None else fields
        if found and not (wanted and set(wanted) <= set(held)):
            raise MissingKeysError.of_fields(wanted, held, partition_id)
        return to_batch([{name: entry.row[name] for name in wanted} for entry in found])

    def list(self, partition_id: str) -> dict[str, dict[str, Any]]:
        with self._changed:
            entries = dict(self._partitions.get(partition_id, {}))
        return {key: dict(entry.tag) for key, entry in entries.items()}

    def clear(self, keys: Sequence[str], partition_id: str) -> None:
        with self._changed:
            partition = self._partitions.get(partition_id, {})
            watches = tuple(self._watches)
            for key in keys:
                if partition.pop(key, None) is not None:
                    for watch in watches:
                        watch.note_gone(partition_id, key)
            if not partition:
                self._partitions.pop(partition_id, None)
            self._wake()

    def watch(self) -> Watch:
        with self._changed:
            watch = _MemoryWatch(self)
            for partition_id, partition in self._partitions.items():
                for key in partition:
                    watch.note(partition_id, key, existed=False)
            self._watches.add(watch)
        return watch

    def _wake(self) -> None:
        self._changed.notify_all()
        for watch in self._watches:
            for wake in watch.wakers:
                wake()

    def __reduce__(self) -> Any:
        raise RlskipError(
            "a MemoryQueue lives in one process and cannot be sent to another",
            remedy="use TransferQueueAdapter between processes",
        )


class _MemoryWatch(Watch):
    """Collects, under the queue's lock, the keys that changed since the last look.

    A key put and cleared between two looks is forgotten, so an idle watch never holds more
    than what the queue held at its last look and holds now.
    """

    def __init__(self, queue: MemoryQueue) -> None:
        self._queue = queue
        # partition -> key -> whether it existed at the last look
        self._changes: dict[str, dict[str, bool]] = {}
        self.wakers: list[Callable[[], object]] = []

    def note(self, partition_id: str, key: str, existed: bool) -> None:
        self._changes.setdefault(partition_id, {}).setdefault(key, existed)

    def note_gone(self, partition_id: str, key: str) -> None:
        keys = self._changes.setdefault(partition_id, {})
        if keys.setdefault(key, True) is False:
            del keys[key]

    def changes(self) -> Changes:
        with self._queue._changed:
            changes, self._changes = self._changes, {}
            return {
                partition_id: self._tags_now(partition_id, keys)
                for partition_id, keys in changes.items()
                if keys
            }

    def _tags_now(self, partition_id: str, keys: Iterable[str]) -> dict[str, Tag | None]:
        partition = self._queue._partitions.get(partition_id, {})
        return {key: entry.tag if (entry := partition.get(key)) else None for key in keys}

    def wait_change(self, timeout: float) -> None:
        with self._queue._changed:
            self._queue._changed.wait_for(self._any, timeout)

    async def await_change(self, timeout: float) -> None:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        wake = functools.partial(loop.call_soon_threadsafe, changed.set)
        with self._queue._changed:
            if self._any():
                return
            self.wakers.append(wake)
        try:
            await asyncio.wait_for(changed.wait(), timeout)
        except asyncio.TimeoutError:
            pass
        finally:
            with self._queue._changed:
                self.wakers.remove(wake)

    def _any(self) -> bool:
        return any(self._changes.values())


def _common_fields(entries: Sequence[_Entry]) -> list[str]:
    """The fields that every entry holds, in the order of the first."""
    first = entries[0].row if entries else {}
    return [name for name in first if all(name in entry.row for entry in entries)]


def _own(row: Row) -> dict[str, Any]:
    """A copy that shares no memory with `row`."""
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in row.items()
    }
