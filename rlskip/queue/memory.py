"""The embedded queue: one process, any number of threads; every change wakes its reader."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict

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
        # By partition and key; a key without fields has no row. They are not in pairs, because
        # a million tuples slow down the garbage collector.
        self._tags = defaultdict[str, dict[str, Tag]](dict)
        self._rows = defaultdict[str, dict[str, OwnRow]](dict)
        self._changed = threading.Condition()
        # What was not polled yet: by partition, each key and whether it existed at the last poll.
        # One that did not and was deleted again is forgotten, so that a watch that nobody polls
        # does not grow.
        self._noted = defaultdict[str, dict[str, bool]](dict)

    def put(
        self, keys: Sequence[str], partition: str, fields: Fields = None, tags: Tags = None
    ) -> None:
        check_put(keys, fields, tags)
        rows: Sequence[Any] = [None] * len(keys)
        if fields is not None:
            is_own = all(type(row) is OwnRow for row in fields)
            rows = fields if is_own else [*map(OwnRow, to_rows(fields))]
        # The rows of a session have one tag: a copy for each would be most of what they take here.
        given = [{}] * len(keys) if tags is None else [*tags]
        copies = {id(tag): dict(tag) for tag in given}
        with self._changed:
            held, kept, noted = self._tags[partition], self._rows[partition], self._noted[partition]
            for key, row, tag in zip(keys, rows, given, strict=True):
                noted.setdefault(key, key in held)
                new = copies[id(tag)]
                held[key] = {**held[key], **new} if key in held else new
                if row:
                    kept[key] = OwnRow({**kept[key], **row}) if key in kept else row
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
            held, kept = self._tags.get(partition, {}), self._rows.get(partition, {})
            if missing := [key for key in keys if key not in held]:
                raise MissingKeysError.of_keys(missing, partition)
            rows: dict[str, Row] = {key: kept.get(key, {}) for key in keys}
        return one_batch(rows, partition, fill_missing, fields=fields, keys=keys)

    def list(self, partition: str) -> dict[str, dict[str, Any]]:
        with self._changed:
            tags = dict(self._tags.get(partition, {}))
        return {key: dict(tag) for key, tag in tags.items()}

    def delete(self, keys: Sequence[str], partition: str) -> None:
        with self._changed:
            held = self._tags.get(partition, {})
            for key in keys:
                if held.pop(key, None) is not None:
                    self._rows[partition].pop(key, None)
                    if not self._noted[partition].setdefault(key, True):
                        del self._noted[partition][key]
            self._changed.notify_all()

    def watch(self) -> Watch:
        with self._changed:
            for name, held in self._tags.items():
                self._noted[name] = dict.fromkeys(held, False)
        return self

    def poll(self) -> Changes:
        with self._changed:
            noted, self._noted = self._noted, defaultdict(dict)
            return {
                name: {key: self._tags[name].get(key) for key in keys}
                for name, keys in noted.items()
                if keys
            }

    def wait_change(self, timeout: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: any(self._noted.values()), timeout)
