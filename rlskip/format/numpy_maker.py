"""Tensors and batches as numpy's arrays, so that looking at a dump loads no torch.

A tensor becomes an array whose ``dtype.metadata["torch"]`` names its dtype. bfloat16 and float8
become float32, and what else numpy lacks is refused. Batches become :mod:`rlskip.batch.tables`.
The functions are those of :mod:`rlskip.format.torch_maker`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlskip.batch.tables import Ragged, Table, Whole
from rlskip.format.dump_errors import UnknownTypeError

_SAME = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
         "float16", "float32", "float64", "complex64", "complex128")  # fmt: skip

size = tuple


def tensor(raw: np.ndarray, name: str, shape: list[int], device: str | None) -> np.ndarray:
    if name in _SAME:
        # What the reader has narrowed says so.
        flat = raw if raw.dtype.metadata else raw.view(name)
    elif name == "bfloat16":
        flat = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif name == "float8_e5m2":  # float16 without its last bits
        flat = (raw.view(np.uint8).astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    elif name == "float8_e4m3fn":  # its exponent has a bias of 7, that of float16 of 15
        sign, rest = (raw.view(np.uint8).astype(np.uint16) & bits for bits in (128, 127))
        flat = (sign << 8 | rest << 7).view(np.float16).astype(np.float32) * np.float32(256)
        flat[rest == 127] = np.nan
    else:
        what = f"it holds torch.{name}, which numpy lacks"
        raise UnknownTypeError(what, remedy="load it into torch")
    if flat.size != math.prod(shape):
        raise ValueError("a tensor of another size than its elements")
    marked = np.dtype(flat.dtype, metadata={"torch": name})  # type: ignore[call-overload]
    return flat.view(marked).reshape(shape)


def jagged(values: Any, offsets: Any, lengths: Any, dim: int) -> Ragged:
    sizes = np.diff(offsets) if lengths is None else lengths
    rows = values.swapaxes(0, dim - 1)
    spans = zip(offsets.tolist(), sizes.tolist(), strict=False)
    return Ragged(rows[start : start + size].swapaxes(0, dim - 1) for start, size in spans)


def tensordict(entries: dict[str, Any], batch_size: list[int], device: str | None) -> Table:
    return Table(entries, batch_size)


def stack(form: str, parts: list[Any], dim: int) -> Any:
    """One table of tables, one array of arrays of one shape; else the parts as they are."""
    first = parts[0]
    if all(isinstance(part, Whole) for part in parts):
        return [part.data for part in parts]
    if all(isinstance(part, Table) for part in parts):
        batch_size = [*first.batch_size]
        batch_size.insert(dim % (len(batch_size) + 1), len(parts))
        names = [name for name in first if all(name in part for part in parts)]
        columns = {name: stack(form, [part[name] for part in parts], dim) for name in names}
        return Table(columns, batch_size)
    if not all(isinstance(part, np.ndarray) for part in parts):
        return parts
    if len({(part.shape, part.dtype) for part in parts}) > 1:
        return Ragged(parts)
    return np.stack(parts, dim).view(first.dtype)  # it says what the tensors were


def wrapped(data: Any, batch_size: list[int]) -> Whole:
    return Whole(data)
