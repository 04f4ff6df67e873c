"""What a trajectory queue is: five calls, and a watch on what changes.

A queue holds, per partition, keys with a *tag* (a small flat mapping) and *fields* (the row's
data). Sessions write it, the replay buffer and the trainer read it. What keys and tags mean
is written in :mod:`rlskip.keys`; a queue itself does not care.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict

from rlskip.errors import RlskipError
from rlskip.keys import ROLLOUT_ROOT_KEYS

Tag = Mapping[str, Any]
Row = Mapping[str, Any]
#: partition -> key -> its tag now, or None when the key is gone. Read-only.
Changes = dict[str, dict[str, "Tag | None"]]


class MissingKeysError(RlskipError, LookupError):
    """A key or a field was asked for that the queue does not hold."""

    @classmethod
    def of_keys(cls, missing: Sequence[str], partition_id: str) -> MissingKeysError:
        names = ", ".join(map(repr, missing[:10])) + (", ..." if len(missing) > 10 else "")
        return cls(f"{len(missing)} keys are not in partition {partition_id!r}: {names}")

    @classmethod
    def of_fields(
        cls, wanted: Sequence[str], held: Sequence[str], partition_id: str
    ) -> MissingKeysError:
        missing = [name for name in wanted if name not in held]
        return cls(
            f"not every row asked for in partition {partition_id!r} holds {', '.join(missing)}"
            if missing
            else f"the keys asked for in partition {partition_id!r} have no field in common",
            remedy=f"fields that all of them hold: {', '.join(held) or 'none'}",
        )


class PutError(RlskipError, ValueError):
    """Keys, fields and tags that do not belong together."""


class QueueUnavailableError(RlskipError, RuntimeError):
    """What a queue needs to run is not installed, or not running."""


@dataclass
class KVBatchMeta:
    """Names a batch of rows without holding their data: TransferQueue's type, field by field.

    ``transfer_queue.KVBatchMeta(**vars(batch))`` is the genuine one, where a host insists.

    Attributes
    ----------
    keys
        The rows, each once.
    tags
        One tag per key, copied.
    partition_id
        The partition all keys are in.
    fields
        The fields that every row holds; None when unknown.
    extra_info
        About the batch as a whole, e.g. ``extra_info["rollout_root_keys"]``.
    """

    keys: list[str] = dataclasses.field(default_factory=list)
    tags: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] | None = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.tags):
            raise ValueError(f"{len(self.keys)} keys, but {len(self.tags)} tags")
        for name, values in (("keys", self.keys), ("fields", self.fields or [])):
            if len(set(values)) != len(values):
                raise ValueError(f"duplicates among the {name}")
        self.tags = [dict(tag) for tag in self.tags]
        self.extra_info = None if self.extra_info is None else dict(self.extra_info)

    @property
    def size(self) -> int:
        """The number of rows."""
        return len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def select_keys(self, keys_to_select: Sequence[str]) -> KVBatchMeta:
        """These rows, in this order; raises RuntimeError when one is not in the batch."""
        position = {key: i for i, key in enumerate(self.keys)}
        unknown = [key for key in keys_to_select if key not in position]
        if unknown:
            raise RuntimeError(f"not in this batch: {unknown}")
        return self._rows([position[key] for key in keys_to_select])

    def reorder(self, indexes: Sequence[int]) -> None:
        """Put the rows into the order of `indexes`, a permutation, in place."""
        if sorted(indexes) != list(range(len(self))):
            raise ValueError(f"expected a permutation of 0..{len(self) - 1}")
        self.keys = [self.keys[i] for i in indexes]
        self.tags = [self.tags[i] for i in indexes]

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """Split into `chunks` runs of rows whose sizes differ by at most one."""
        size, rest = divmod(len(self), chunks)
        starts = [i * size + min(i, rest) for i in range(chunks + 1)]
        return [self._rows(range(*bounds)) for bounds in itertools.pairwise(starts)]

    @classmethod
    def concat(cls, data: Sequence[KVBatchMeta]) -> KVBatchMeta:
        """All rows of several batches of one partition; their root keys are joined.

        Raises ValueError when partitions, fields or any other extra_info disagree.
        """
        data = [batch for batch in data if len(batch)]
        if not data:
            return cls()
        if len({batch.partition_id for batch in data}) > 1:
            raise ValueError("the batches are of several partitions")
        if len({None if b.fields is None else frozenset(b.fields) for b in data}) > 1:
            raise ValueError("the batches hold different fields")
        extra: dict[str, Any] = {}
        for batch in data:
            for name, value in (batch.extra_info or {}).items():
                if name == ROLLOUT_ROOT_KEYS:
                    value = list(dict.fromkeys([*extra.get(name, []), *value]))
                elif name in extra and extra[name] != value:
                    raise ValueError(f"extra_info[{name!r}] differs between the batches")
                extra[name] = value
        return cls(
            keys=[key for batch in data for key in batch.keys],
            tags=[tag for batch in data for tag in batch.tags],
            partition_id=data[0].partition_id,
            fields=data[0].fields,
            extra_info=extra,
        )

    def _rows(self, indexes: Sequence[int]) -> KVBatchMeta:
        return dataclasses.replace(
            self, keys=[self.keys[i] for i in indexes], tags=[self.tags[i] for i in indexes]
        )


class Watch(ABC):
    """One reader's view of what changes in a queue, over all partitions.

    The loop that every reader runs::

        while not satisfied(watch.changes()):
            watch.wait_change(timeout=1.0)

    Any thread may call it, and each change is reported to one caller.
    """

    @abstractmethod
    def changes(self) -> Changes:
        """What changed since the last call, at once; first everything the queue holds.

        A key that changed several times is reported once, as it is now.
        """

    @abstractmethod
    def wait_change(self, timeout: float) -> None:
        """Return when :meth:`changes` may have something to report, after `timeout` s at most."""

    async def achanges(self) -> Changes:
        """As :meth:`changes`, off the event loop."""
        return await asyncio.to_thread(self.changes)

    async def await_change(self, timeout: float) -> None:
        """As :meth:`wait_change`, off the event loop."""
        await asyncio.to_thread(self.wait_change, timeout)


class TrajectoryQueue(ABC):
    """Keys with tags and fields, by partition. Every call is safe from any thread.

    The names with an ``a`` are the same calls for coroutines. To write a queue of your own,
    implement the five plain calls and run :class:`rlskip.testing.QueueTests` on it.
    """

    @abstractmethod
    def put(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: TensorDict | Sequence[Row] | None = None,
        tags: Sequence[Tag] | None = None,
    ) -> KVBatchMeta:
        """Create or update keys: tags and fields are merged into what is there.

        A reader that sees the new tag finds the new fields, too.

        Parameters
        ----------
        keys
            At least one, each once.
        partition_id
            Created by its first key.
        fields
            One row per key: a TensorDict of batch size ``(len(keys),)``, or one mapping per
            key, whose tensors may differ in length. Copied.
        tags
            One tag per key. Either fields or tags must be given.

        Returns
        -------
        KVBatchMeta
            The keys with their merged tags and the fields that all of them hold now.

        Raises
        ------
        PutError
            Nothing to put, a key twice, or lengths that differ.
        """

    @abstractmethod
    def get(
        self, keys: Sequence[str], partition_id: str, fields: Sequence[str] | None = None
    ) -> TensorDict:
        """The rows at `keys`, in that order.

        Parameters
        ----------
        keys
            The rows wanted; none gives an empty batch.
        partition_id
            Where they are.
        fields
            The fields to return; None for those that all these rows hold.

        Returns
        -------
        TensorDict
            Batch size ``(len(keys),)``. Scalars come as a tensor of shape ``(len(keys),)``,
            tensors as one jagged nested tensor (lengths may differ between rows), anything
            else as a NonTensorStack. :func:`rlskip.queue.to_rows` takes it apart again.

        Raises
        ------
        MissingKeysError
            Names the keys, or the fields, that are not there. Never a shorter batch.
        """

    @abstractmethod
    def list(self, partition_id: str) -> dict[str, dict[str, Any]]:
        """Every key of a partition with a copy of its tag; empty for an unknown partition."""

    @abstractmethod
    def clear(self, keys: Sequence[str], partition_id: str) -> None:
        """Remove keys with their tags and fields. Keys that are not there do not matter."""

    @abstractmethod
    def watch(self) -> Watch:
        """A new :class:`Watch`. The queue forgets it when the caller does."""

    async def aput(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: TensorDict | Sequence[Row] | None = None,
        tags: Sequence[Tag] | None = None,
    ) -> KVBatchMeta:
        return await asyncio.to_thread(self.put, keys, partition_id, fields, tags)

    async def aget(
        self, keys: Sequence[str], partition_id: str, fields: Sequence[str] | None = None
    ) -> TensorDict:
        return await asyncio.to_thread(self.get, keys, partition_id, fields)

    async def alist(self, partition_id: str) -> dict[str, dict[str, Any]]:
        return await asyncio.to_thread(self.list, partition_id)

    async def aclear(self, keys: Sequence[str], partition_id: str) -> None:
        await asyncio.to_thread(self.clear, keys, partition_id)


def check_put(
    keys: Sequence[str],
    fields: TensorDict | Sequence[Row] | None,
    tags: Sequence[Tag] | None,
) -> None:
    """What every queue refuses in a put; raises :class:`PutError`."""
    if isinstance(keys, str):
        raise PutError(f"expected a sequence of keys, got the string {keys!r}")
    if not keys:
        raise PutError("no keys to put")
    if len(set(keys)) != len(keys):
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise PutError(f"keys given twice: {', '.join(twice)}")
    if fields is None and tags is None:
        raise PutError("nothing to put", remedy="give fields, tags, or both")
    for name, values in (("fields", fields), ("tags", tags)):
        if values is not None and len(values) != len(keys):
            raise PutError(f"{len(keys)} keys, but {len(values)} {name}")
