"""The trajectory queue: five calls, and a watch that reports changes; and the rows in it.

A queue holds, per partition, keys (:mod:`rlskip.keys`) with a *tag* (a small flat mapping) and
*fields* (the row's data). Sessions write to it; the replay buffer and the trainer read from it.

A row is a mapping. The tensors of rows may differ in length; a batch holds them as a jagged nested
tensor. The rules are TransferQueue's (0.1.11, `AsyncSimpleStorageManager._pack_field_values`), so
that batches of all queues look the same.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np
import torch
from tensordict import (
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
)

from rlskip.batch.columns import columns_of, rows_of
from rlskip.batch.columns import own as own_value
from rlskip.errors import RlskipError
from rlskip.keys import split_trajectory

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


@dataclasses.dataclass
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

        Give fields, tags or both: one for each key, of which there is at least one, without
        duplicates. Fields are a TensorDict of batch size ``(len(keys),)``, or mappings, whose
        tensors may differ in length; they are copied. A reader that sees the new tag also finds
        the new fields. Raises :class:`PutError` as :func:`check_put` does.
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
        """Return the rows at `keys`, in that order: these `fields`, or all.

        With `fill_missing` (``dispatch.fill_missing``) a field that some rows lack is None there,
        unless it is a tensor; else all rows must hold the fields.

        They are a TensorDict of batch size ``(len(keys),)``. Scalars of one dtype form a tensor of
        that shape, other tensors one jagged nested tensor (rows may differ in length), any other
        values a NonTensorStack. :func:`rlskip.queue.to_rows` splits it into rows again.

        Raises MissingKeysError if a key is missing, or holds no fields: a shorter batch is never
        returned. Raises UnequalFieldsError if a row lacks a field, which is not to be filled.
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
    """Raise PutError where no queue accepts a put: of nothing, a key twice, or unequal lengths."""
    if isinstance(keys, str):
        raise PutError(f"expected a sequence of keys, got the string {keys!r}")
    if not keys or (fields is None and tags is None):
        raise PutError("nothing to put", remedy="give keys, and fields, tags, or both")
    if twice := [key for key, count in Counter(keys).items() if count > 1]:
        raise PutError(f"keys given twice: {', '.join(twice)}")
    for name, values in (("fields", fields), ("tags", tags)):
        if values is not None and len(values) != len(keys):
            raise PutError(f"{len(keys)} keys, but {len(values)} {name}")


# -- rows ----------------------------------------------------------------------------------------


_SHORT = 1 << 14  # bytes; beside longer ones it does not count what a tensor takes more


@attrs.frozen
class _Array:
    """An array that is one in the row, too."""

    value: np.ndarray


class OwnRow(MutableMapping[str, Any]):
    """A row that shares no memory with anything: what is set is copied.

    Short tensors are `kept` as arrays. A tensor takes half a kilobyte besides its values, and the
    garbage collector looks through it: of a million rows that is most of the memory and the time.
    """

    __slots__ = ("kept",)

    def __init__(self, row: Row | None = None) -> None:
        self.kept: dict[str, Any] = {}
        for name, value in row.items() if row else ():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if type(value) is torch.Tensor:
            try:
                if (array := value.numpy()).nbytes <= _SHORT:
                    self.kept[name] = array.copy()
                    return
            except (TypeError, RuntimeError):  # on another device, or of a type that numpy lacks
                pass
        value = own_value(value)
        self.kept[name] = _Array(value) if isinstance(value, np.ndarray) else value

    def __getitem__(self, name: str) -> Any:
        value = self.kept[name]
        if type(value) is np.ndarray:
            return torch.from_numpy(value)
        return value.value if type(value) is _Array else value

    def __delitem__(self, name: str) -> None:
        del self.kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.kept)

    def __len__(self) -> int:
        return len(self.kept)


def to_rows(fields: TensorDictBase | Sequence[Row]) -> list[dict[str, Any]]:
    """One mapping per row; tensors are views into the batch.

    A value for the whole batch (NonTensorData) belongs to every row. Raises PutError where a field
    is itself a TensorDict or a tensorclass, or the mappings hold different fields.
    """
    rows = rows_of(fields)
    parts = [columns_of(fields)] if isinstance(fields, TensorDictBase) else rows
    for name, value in itertools.chain.from_iterable(part.items() for part in parts):
        if is_tensor_collection(value) and not is_non_tensor(value):
            what = f"field {name!r} is a nested {type(value).__name__}"
            raise PutError(what, remedy="put its fields flat")
        if not isinstance(name, str):
            raise PutError(f"the name {name!r:.80} of a field is not a string")
    for row in rows:
        if row.keys() != rows[0].keys():
            odd = ", ".join(sorted(row.keys() ^ rows[0].keys()))
            remedy = "put rows with different fields separately"
            raise PutError(f"some rows hold {odd} and some do not", remedy=remedy)
    return rows


def one_batch(
    rows: Mapping[str, Row],
    partition: str,
    fill_missing: bool = False,
    *,
    fields: Sequence[str] | None = None,
    keys: Iterable[str] = (),
    own: bool = False,
) -> TensorDict:
    """These `fields`, or all, of rows by key as one batch: every reader's rule for unequal rows.

    It has the rows at `keys`, of which one may occur twice, or all. A field that some rows lack is
    an error (:func:`check_fields`). With `fill_missing` it is None there, unless any row holds a
    tensor or an array under its name: a missing tensor has no None.
    `own`: nobody else has the rows, so only tensors are copied.
    """
    filled: set[str] = set()
    if fill_missing:
        items = list(itertools.chain.from_iterable(row.items() for row in rows.values()))
        dense = {name for name, value in items if isinstance(value, (torch.Tensor, np.ndarray))}
        filled = {name for name, _ in items} - dense
    names = check_fields(rows, partition, fields, filled)
    return to_batch([rows[key] for key in keys or rows], names, own=own)


def check_fields(
    rows: Mapping[str, Collection[str]],
    partition: str,
    fields: Sequence[str] | None = None,
    filled: Collection[str] = (),
) -> list[str]:
    """The fields of a batch of rows, each of which has these names of fields, by key.

    Raises MissingKeysError where a row holds nothing, and UnequalFieldsError where one lacks a
    field that is not `filled`: of the fields that the fewest rows lack, it names one of these rows,
    which is the row to look at.
    """
    where = f"partition {partition!r}"
    if empty := [key for key, names in rows.items() if not names]:
        raise MissingKeysError(f"{', '.join(map(repr, empty[:10]))}: no field is there", where)
    counts = Counter(itertools.chain.from_iterable(rows.values()))
    wanted = list(counts if fields is None else fields)
    lacked = [name for name in wanted if counts[name] < len(rows) and name not in filled]
    if lacked:
        field = max(lacked, key=counts.__getitem__)
        lacking = [key for key, names in rows.items() if field not in names]
        form = split_trajectory(lacking[0])
        who = f" (session {form[1]} of prompt {form[0]!r})" if form else ""
        more = f", and so do {len(lacking) - 1} more" if len(lacking) > 1 else ""
        held = ", ".join(name for name, count in counts.items() if count == len(rows)) or "none"
        raise UnequalFieldsError(
            f"the rows do not hold the same fields: {lacking[0]!r}{who} lacks {field!r}{more}",
            where,
            f"return the same fields from every session, or read those that all rows hold: {held}",
        )
    return wanted


def to_batch(rows: Sequence[Row], names: Iterable[str], *, own: bool = False) -> TensorDict:
    """The fields of these names of rows as one TensorDict, which shares no memory with them.

    Its layout is that of :meth:`TrajectoryQueue.get`; tensors whose shapes or dtypes do not allow a
    nested one are in a NonTensorStack. `own` is that of :func:`one_batch`.
    """
    batch = {name: _pack(rows, name, own) for name in names}
    return TensorDict(batch, batch_size=[len(rows)])


def _pack(rows: Sequence[Row], name: str, own: bool) -> torch.Tensor | NonTensorStack:
    arrays: list[Any] = [row.kept.get(name) for row in rows if isinstance(row, OwnRow)]
    if len(arrays) == len(rows) and {*map(type, arrays)} == {np.ndarray}:
        kinds = {(array.dtype, array.ndim, array.shape[1:]) for array in arrays}
        if kinds == {(arrays[0].dtype, 0, ())}:
            return torch.from_numpy(np.array(arrays))
        if len(kinds) == 1:  # what `as_nested_tensor` does, in a tenth of its time
            ends = torch.from_numpy(np.cumsum([0, *map(len, arrays)]))
            return torch.nested.nested_tensor_from_jagged(
                torch.from_numpy(np.concatenate(arrays)), ends
            )
    values: list[Any] = [row.get(name) for row in rows]
    if all(isinstance(value, torch.Tensor) for value in values):
        if {(value.dim(), value.dtype) for value in values} == {(0, values[0].dtype)}:
            return torch.stack(values)
        try:
            return torch.nested.as_nested_tensor(values, layout=torch.jagged)
        except RuntimeError:  # ragged in more than the first dimension, or of several dtypes
            pass
    return NonTensorStack(*(values if own else copy.deepcopy(values)))
