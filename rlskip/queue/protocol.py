"""The trajectory queue: five calls, and a watch that reports changes.

A queue holds, per partition, keys (:mod:`rlskip.keys`) with a *tag* (a small flat mapping) and
*fields* (the row's data). Sessions write to it; the replay buffer and the trainer read from it.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tensordict import TensorDict

from rlskip.errors import RlskipError
from rlskip.keys import ATTEMPT, ROWS_PER_ATTEMPT, integer, split_trajectory

Tag = Mapping[str, Any]
Row = Mapping[str, Any]
Fields: TypeAlias = "TensorDict | Sequence[Row] | None"
Tags: TypeAlias = "Sequence[Tag] | None"
#: partition -> key -> its current tag, or None if the key was deleted. Read-only.
Changes = dict[str, dict[str, "Tag | None"]]


class MissingKeysError(RlskipError, LookupError):
    """The queue does not hold a requested key or field."""

    @classmethod
    def of_keys(cls, missing: Sequence[str], partition: str) -> MissingKeysError:
        names = ", ".join(map(repr, missing[:10])) + (", ..." if len(missing) > 10 else "")
        return cls(f"{len(missing)} keys are not in partition {partition!r}: {names}")


class UnequalFieldsError(MissingKeysError):
    """Rows that are read as one batch do not hold the same fields."""


class PutError(RlskipError, ValueError):
    """Keys, fields and tags that do not fit together."""


class QueueUnavailableError(RlskipError, RuntimeError):
    """A dependency of the queue is not installed or not running."""


@dataclass
class KVBatchMeta:
    """Names a batch of rows without holding their data.

    The fields are those of ``transfer_queue.KVBatchMeta`` (0.1.11), which takes ``**vars(batch)``.
    """

    keys: list[str] = dataclasses.field(default_factory=list)
    tags: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] | None = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.keys)


class Watch(ABC):
    """The changes in a queue, over all partitions, each of which is reported once."""

    @abstractmethod
    def poll(self) -> Changes:
        """Return what changed since the last call; the first returns everything. Does not wait."""

    @abstractmethod
    def wait_change(self, timeout: float) -> None:
        """Wait until :meth:`poll` may have something to report, at most `timeout` seconds."""


class TrajectoryQueue(ABC):
    """Keys with tags and fields, by partition. Every call is thread-safe.

    A queue of your own implements the five abstract methods.
    """

    buffer: Any = None  # the last ReplayBuffer that was made for it
    dispatcher: Any = None  # the last RolloutDispatcher, while that is open

    @abstractmethod
    def put(
        self, keys: Sequence[str], partition: str, fields: Fields = None, tags: Tags = None
    ) -> None:
        """Create or update keys: tags and fields are merged into the existing ones.

        A reader that sees the new tag also finds the new fields.

        Parameters
        ----------
        keys
            At least one key, without duplicates.
        fields
            One row per key: a TensorDict of batch size ``(len(keys),)``, or one mapping per
            key, whose tensors may differ in length. Copied.
        tags
            One tag per key. Give fields, tags or both.

        Raises
        ------
        PutError
            There is nothing to put, a key is given twice, lengths differ, or a row's tag names
            another attempt than its key.
        """

    @abstractmethod
    def get(
        self,
        keys: Sequence[str],
        partition: str,
        fields: Sequence[str] | None = None,
        *,
        fill_missing: bool = False,
    ) -> TensorDict:
        """Return the rows at `keys`, in that order.

        Those of `fields`, or all. With `fill_missing` (``dispatch.fill_missing``) a field that
        some rows lack is None there, unless it is a tensor; else all rows must hold the fields.

        Returns
        -------
        TensorDict
            Batch size ``(len(keys),)``. Scalars form a tensor of shape ``(len(keys),)``, other
            tensors one jagged nested tensor (rows may differ in length), any other values a
            NonTensorStack. :func:`rlskip.queue.to_rows` splits it into rows again.

        Raises
        ------
        MissingKeysError
            A key is missing, or holds no fields. A shorter batch is never returned.
        UnequalFieldsError
            A row lacks a field, which is not to be filled.
        """

    @abstractmethod
    def list(self, partition: str) -> dict[str, dict[str, Any]]:
        """Return each key of a partition with a copy of its tag; empty for an unknown partition."""

    @abstractmethod
    def delete(self, keys: Sequence[str], partition: str) -> None:
        """Delete keys with their tags and fields; unknown keys are ignored."""

    @abstractmethod
    def watch(self) -> Watch:
        """Return a :class:`Watch`; of those of a queue, the last one reports."""


def check_put(keys: Sequence[str], fields: Fields, tags: Tags) -> None:
    """Refuse arguments of a put that no queue accepts; raises :class:`PutError`."""
    if isinstance(keys, str):
        raise PutError(f"expected a sequence of keys, got the string {keys!r}")
    if not keys:
        raise PutError("no keys to put")
    if twice := [key for key, count in Counter(keys).items() if count > 1]:
        raise PutError(f"keys given twice: {', '.join(twice)}")
    if fields is None and tags is None:
        raise PutError("nothing to put", remedy="give fields, tags, or both")
    for name, values in (("fields", fields), ("tags", tags)):
        if values is not None and len(values) != len(keys):
            raise PutError(f"{len(keys)} keys, but {len(values)} {name}")
    for key, tag in zip(keys, tags or (), strict=False):
        attempt, parts = integer(tag.get(ATTEMPT)), split_trajectory(key)
        if attempt is not None and parts is not None and parts[2] // ROWS_PER_ATTEMPT != attempt:
            raise PutError(
                f"{key!r} is not a key of attempt {attempt}, and may be that of another one's row",
                remedy="write rows under session.key(i), with session.tag(); or under "
                "TrajectoryKey.of_attempt(uid, session_id, index, attempt)",
            )
