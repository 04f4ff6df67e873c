"""The columns and the rows of a batch of any kind.

A *column* is a tensor, an array or a sequence with one value per row, or one value for the whole
batch. TensorDicts may be lazy stacks and hold NonTensorData; tensors may be nested (jagged).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from rlskip.batch.meta import plain
from rlskip.batch.tables import Table, Whole, loaded
from rlskip.errors import RlskipError

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDictBase

_IMMUTABLE = (int, float, str, bool, bytes, type(None))

UIDS = ("uid", "uids")
"""Names of the column that identifies a batch's prompts."""

# Names under which trainers keep what a reward function returned.
SCORES = {"rm_scores", "token_level_scores", "token_level_rewards", "scores", "rewards", "reward"}


class PromptsError(RlskipError, ValueError):
    """Prompts that cannot be distinguished."""


def is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether `value` is a tensor; torch is not loaded for the question."""
    return isinstance(value, loaded("torch", "Tensor"))


def is_tensordict(value: Any) -> TypeGuard[TensorDictBase]:
    """Whether `value` is a TensorDict or a stack of them; tensordict is not loaded for this."""
    return isinstance(value, loaded("tensordict", "TensorDictBase"))


def is_lazy(value: Any) -> TypeGuard[TensorDictBase]:
    """Whether `value` is a lazy stack of TensorDicts, or a stack of wrapped values."""
    return isinstance(value, loaded("tensordict", "LazyStackedTensorDict"))


def is_wrapped(value: Any) -> bool:
    """Whether `value` is one for a whole batch, as TensorDicts hold it."""
    return isinstance(value, (Whole, loaded("tensordict", "NonTensorData")))


def is_data_proto(value: Any) -> bool:
    """Whether `value` is a DataProto, by its parts: verl need not be importable."""
    return hasattr(value, "batch") and hasattr(value, "non_tensor_batch")


def columns_of(batch: Any) -> dict[Any, Any]:
    """The columns of a batch by name, NonTensorData still wrapped; empty for any other value."""
    if type(batch) is dict:  # at once: each row is one
        return batch.copy()
    if is_tensordict(batch):
        return {key: _entry(batch, key) for key in list(batch.keys())}
    if is_data_proto(batch):
        return {**columns_of(batch.batch), **batch.non_tensor_batch}
    if isinstance(batch, Mapping):
        return dict(batch)
    if _is_rows(batch):
        names = dict.fromkeys(name for row in batch for name in row)
        return {name: [row.get(name) for row in batch] for name in names}
    return {}


def column_length(column: Any) -> int | None:
    """How many values a column has; None if it is a single value for the whole batch."""
    if is_tensor(column):
        return int(column.size(0)) if column.dim() else None  # a strided nested one has no shape
    if isinstance(column, np.ndarray):
        return len(column) if column.ndim else None
    if is_wrapped(column):
        return None
    if is_tensordict(column) or isinstance(column, Table):
        return column.batch_size[0] if column.batch_size else None
    return len(column) if isinstance(column, list | tuple) else None


def cells_of(column: Any, n: int | None = None) -> Sequence[Any] | None:
    """One value per row; None if there are not `n` of them, or one value for all rows."""
    length = column_length(column)
    if length is None or n not in (None, length):
        return None
    if is_tensor(column):
        return column.unbind()
    if isinstance(column, loaded("tensordict", "NonTensorStack")):
        return column.tolist()  # type: ignore[no-any-return]
    if isinstance(column, Table):
        return rows_of(column)
    return column if isinstance(column, list | tuple) else [column[i] for i in range(length)]


def values_at(batch: Any, path: str) -> Sequence[Any] | None:
    """The values of a column, ``score``, or of an entry of each, ``ids.group``; None without it."""
    columns = columns_of(batch)
    name, _, entry = (path, "", "") if path in columns else path.partition(".")
    cells = cells_of(columns[name]) if name in columns else None
    if not entry or cells is None:
        return cells
    return [cell.get(entry) if isinstance(cell, Mapping) else None for cell in cells]


def objects_of(values: Sequence[Any]) -> np.ndarray:
    """A 1-D object array of `values`; lists among them stay lists."""
    return np.fromiter(values, object, len(values))


def length_of(batch: Any) -> int:
    """How many rows a batch has: those it states, or its uids, or as most columns have values."""
    if (is_tensordict(batch) or isinstance(batch, Table)) and batch.batch_size:
        return int(batch.batch_size[0])
    if is_data_proto(batch) and batch.batch is not None:
        return length_of(batch.batch)
    if isinstance(batch, list | tuple):
        return len(batch)
    lengths = {}
    for name, column in columns_of(batch).items():
        if (length := column_length(column)) is not None:
            lengths[name] = length
    for name in UIDS:
        if name in lengths:
            return lengths[name]
    counts = Counter(lengths.values())
    return max(counts, key=lambda length: (counts[length], length), default=0)


def rows_of(batch: Any) -> list[dict[str, Any]]:
    """One mapping per row; tensors are views. A value for the whole batch is in every row."""
    if isinstance(batch, list | tuple):
        return [dict(row) for row in batch] if _is_rows(batch) else []
    n = length_of(batch)
    cells: dict[str, Sequence[Any]] = {}
    for name, column in columns_of(batch).items():
        found = cells_of(column, n)
        cells[name] = [unwrapped(column)] * n if found is None else found
    return [{name: values[i] for name, values in cells.items()} for i in range(n)]


def select(batch: Any, rows: Sequence[int]) -> Any:
    """These rows, at least one, as a batch of the same kind; values for the whole batch stay."""
    if isinstance(batch, list | tuple):
        return [batch[i] for i in rows]
    n = length_of(batch)
    if is_data_proto(batch):
        some = copy.copy(batch)
        some.batch = None if batch.batch is None else select(batch.batch, rows)
        some.non_tensor_batch = {k: _some(v, rows, n) for k, v in batch.non_tensor_batch.items()}
        return some
    if is_tensordict(batch) or isinstance(batch, Table):
        return _some(batch, rows, n)
    return {name: _some(column, rows, n) for name, column in batch.items()}


def _some(column: Any, rows: Sequence[int], n: int) -> Any:
    if column_length(column) != n:
        return column
    if is_tensor(column) and column.is_nested:
        import torch

        tensors = column.unbind()
        return torch.nested.as_nested_tensor([tensors[i] for i in rows], layout=column.layout)
    if is_tensordict(column) and not is_lazy(column):
        # An index of a TensorDict does not reach into jagged tensors.
        nested = {
            name: value
            for name, value in columns_of(column).items()
            if (is_tensor(value) and value.is_nested)
            or (is_tensordict(value) and not is_lazy(value))
        }
        some = column.exclude(*nested)[list(rows)]
        return some.update({name: _some(value, rows, n) for name, value in nested.items()})
    if isinstance(column, Table):
        size = [len(rows), *column.batch_size[1:]]
        return Table({name: _some(value, rows, n) for name, value in column.items()}, size)
    if isinstance(column, list | tuple):
        return type(column)(column[i] for i in rows)
    return column[list(rows)]


def _entry(batch: TensorDictBase, name: str) -> Any:
    try:
        return batch._get_str(name, None)
    # A lazy stack of tensors of several shapes, or of other values along another dimension.
    except (RuntimeError, AttributeError):
        return [unwrapped(_entry(part, name)) for part in batch.tensordicts]


def _is_rows(value: Any) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    is_sequence = isinstance(value, list | tuple)
    return is_sequence and bool(value) and all(isinstance(row, Mapping) for row in value)


def unwrapped(value: Any) -> Any:
    """What NonTensorData holds; any other value as it is."""
    return value.data if is_wrapped(value) else value


def own(value: Any) -> Any:
    """Copy `value`, so that the copy shares no memory with it; views are copied, too."""
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind is dict:
        return {key: own(item) for key, item in value.items()}
    if kind in (list, tuple):
        return kind([own(item) for item in value])
    if is_tensor(value):
        # To detach costs a third of a short copy, and a batch has a million of them.
        return (value.detach() if value.requires_grad else value).clone()
    # copy.deepcopy of a tensorclass, such as NonTensorData, copies nothing.
    is_collection = loaded("tensordict", "is_tensor_collection")
    return value.clone() if is_collection and is_collection(value) else copy.deepcopy(value)


def field_names(batch: Any) -> set[str]:
    """Names of the fields of a batch; empty for other values."""
    return {str(name) for name in columns_of(batch)}


def drop_fields(batch: Any, names: Collection[str]) -> Any:
    """`batch` without the fields in `names`; the same object when there is nothing to drop."""
    names = set(names) & field_names(batch)
    if not names:
        return batch
    if is_tensordict(batch):
        return batch.exclude(*names)
    if is_data_proto(batch):
        kept = copy.copy(batch)
        kept.batch = drop_fields(batch.batch, names)
        kept.non_tensor_batch = drop_fields(batch.non_tensor_batch, names)
        return kept
    if isinstance(batch, list | tuple):
        return type(batch)(drop_fields(row, names) for row in batch)
    kept = {key: value for key, value in batch.items() if key not in names}
    return Table(kept, batch.batch_size) if isinstance(batch, Table) else kept


def uids_of(prompts: Any) -> list[str]:
    """The prompts' uids, in order; raises PromptsError if one is missing or occurs twice."""
    uids = cells_of(_uid_column(prompts))
    if uids is None:
        raise PromptsError(
            f"these prompts have no uids (they are a {type(prompts).__name__})",
            remedy="give them a field `uid`, one for each; or name the argument that holds the "
            "prompts: annotate(prompts=...)",
        )
    uids = named(uids)
    if len(set(uids)) < len(uids):
        twice = sorted({uid for uid in uids if uids.count(uid) > 1})
        raise PromptsError(f"uids given twice: {', '.join(twice)}", remedy="submit each once")
    return uids


def named(uids: Iterable[Any]) -> list[str]:
    """Uids as queues and dumps name them: numbers, tensors and the like as text."""
    return [str(plain(uid)) for uid in uids]


def first_uid(values: Iterable[Any]) -> str | None:
    """The first row's uid of the first of `values` that is a batch with uids."""
    for value in values:
        uids = plain(_uid_column(value))
        if uids is not None:
            return uids if isinstance(uids, str) else str(next(iter(uids), None))
    return None


def _uid_column(prompts: Any) -> Any:
    columns = columns_of(prompts)
    return next((columns[name] for name in UIDS if name in columns), None)
