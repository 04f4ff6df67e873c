"""The embedded queue: one process, any number of threads; every change wakes its reader."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict

from rlskip.batch.columns import own
from rlskip.queue.protocol import (
    Changes,
    Fields,
    MissingKeysError,
    OwnRow,
    Row,
    Tag,
    Tags,
    TrajectoryQueue,
    Watch,
    check_put,
    one_batch,
    to_rows,
)


class MemoryQueue(TrajectoryQueue, Watch):
    """A trajectory queue inside this process, which cannot be pickled.

    Values are copied on the way in and on the way out. A change wakes a waiting reader, and the
    cost of a poll depends on what changed, not on what the queue holds.
    """

    # `_changed` is held whenever the state below is read or written. A put makes a new tag and a
    # new row, so those that a reader holds never change.

    def __init__(self) -> None:
        self._partitions: dict[str, dict[str, tuple[Tag, Row]]] = {}
        self._changed = threading.Condition()
        # What was not polled yet: by partition, each key and whether it existed at the last poll.
        # One that did not and was deleted again is forgotten, so that a watch that nobody polls
        # does not grow.
        self._noted: dict[str, dict[str, bool]] = {}

    def put(
        self, keys: Sequence[str], partition: str, fields: Fields = None, tags: Tags = None
    ) -> None:
        check_put(keys, fields, tags)
        rows: Sequence[Row] = [{}] * len(keys)
        if fields is not None:
            is_own = all(type(row) is OwnRow for row in fields)
            rows = fields if is_own else own(to_rows(fields))
        # The rows of a session have one tag: a copy for each would be most of what they take here.
        given = [{}] * len(keys) if tags is None else [*tags]
        copies = {id(tag): dict(tag) for tag in given}
        with self._changed:
            held = self._partitions.setdefault(partition, {})
            noted = self._noted.setdefault(partition, {})
            for key, row, tag in zip(keys, rows, given, strict=True):
                new = copies[id(tag)], row
                if old := held.get(key):
                    new = {**old[0], **new[0]}, {**old[1], **row}
                noted.setdefault(key, old is not None)
                held[key] = new
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
            rows = {key: held[key][1] for key in keys if key in held}
        if missing := [key for key in keys if key not in rows]:
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
        return self

    def poll(self) -> Changes:
        with self._changed:
            noted, self._noted = self._noted, {}
            changes: Changes = {}
            for name, keys in noted.items():
                if keys:
                    held = self._partitions.get(name, {})
                    changes[name] = {key: held[key][0] if key in held else None for key in keys}
            return changes

    def wait_change(self, timeout: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: any(self._noted.values()), timeout)
