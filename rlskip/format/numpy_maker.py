"""Tensors and batches as numpy's arrays, so that looking at a dump loads no torch.

A tensor becomes an array whose ``dtype.metadata["torch"]`` names its dtype. bfloat16 becomes
float32, integers that the reader narrows stay narrow, and what else numpy lacks is refused. A
nested tensor becomes a :class:`~rlskip.batch.tables.Ragged` of its rows, a TensorDict a
:class:`~rlskip.batch.tables.Table` of columns, a wrapped value a
:class:`~rlskip.batch.tables.Whole`, a DataProto its parts.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlskip.batch.tables import DataProtoParts, Ragged, Table, Whole
from rlskip.format.dump_errors import UnknownTypeError

_SAME = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
         "float16", "float32", "float64", "complex64", "complex128")  # fmt: skip


class NumpyMaker:
    """Makes arrays; its methods are those of :class:`~rlskip.format.torch_maker.TorchMaker`."""

    host_classes = False

    def dtype(self, name: str) -> str:
        return f"torch.{name}"

    def size(self, sizes: list[int]) -> tuple[int, ...]:
        return tuple(sizes)

    def tensor(
        self, raw: np.ndarray, dtype: str, shape: list[int], device: str | None
    ) -> np.ndarray:
        if dtype in _SAME:
            # What the reader has narrowed says so.
            flat = raw if raw.dtype.metadata else raw.view(dtype)
        elif dtype == "bfloat16":
            flat = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            remedy = "load it into torch"
            raise UnknownTypeError(f"it holds torch.{dtype}, which numpy lacks", remedy=remedy)
        if flat.size != math.prod(shape):
            raise ValueError("a tensor of another size than its elements")
        marked = np.dtype(flat.dtype, metadata={"torch": dtype})  # type: ignore[call-overload]
        return flat.view(marked).reshape(shape)

    def jagged(self, values: Any, offsets: Any, lengths: Any, dim: int) -> Ragged:
        sizes = np.diff(offsets) if lengths is None else lengths
        rows = values.swapaxes(0, dim - 1)
        spans = zip(offsets.tolist(), sizes.tolist(), strict=False)
        return Ragged(rows[start : start + size].swapaxes(0, dim - 1) for start, size in spans)

    def nested(self, tensors: list[Any]) -> Ragged:
        return Ragged(tensors)

    def tensordict(
        self, entries: dict[str, Any], batch_size: list[int], device: str | None
    ) -> Table:
        return Table(entries, batch_size)

    def stack(self, form: str, parts: list[Any], dim: int) -> Any:
        return _stacked(parts, dim)

    def wrapped(self, data: Any, batch_size: list[int]) -> Whole:
        return Whole(data)

    def data_proto(self, batch: Any, others: dict[str, Any], meta_info: Any) -> DataProtoParts:
        return DataProtoParts(batch, others, meta_info)

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, np.ndarray)

    def as_array(self, tensor: np.ndarray) -> np.ndarray:
        return tensor


def _stacked(parts: list[Any], dim: int) -> Any:
    """One table of tables, one array of arrays of one shape; else the parts as they are."""
    first = parts[0]
    if all(isinstance(part, Whole) for part in parts):
        return [part.data for part in parts]
    if all(isinstance(part, Table) for part in parts):
        batch_size = list(first.batch_size)
        batch_size.insert(dim % (len(batch_size) + 1), len(parts))
        names = [name for name in first if all(name in part for part in parts)]
        return Table({name: _stacked([p[name] for p in parts], dim) for name in names}, batch_size)
    if not all(isinstance(part, np.ndarray) for part in parts):
        return parts
    if len({(part.shape, part.dtype) for part in parts}) > 1:
        return Ragged(parts)
    return np.stack(parts, dim).view(first.dtype)  # it says what the tensors were
