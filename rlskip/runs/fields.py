"""The fields of a dump: kind, shape, dtype, and the range of their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch

from rlskip.runs.trajectories import Column, Padded, values


@attrs.frozen
class Field:
    """One field of the rollouts; `min`, `mean` and `max` leave out what is known to be padding.

    ``shape`` of a ragged field has the range of the lengths: ``4x3..8``.
    """

    name: str
    kind: str
    shape: str
    dtype: str
    min: float | None = None
    mean: float | None = None
    max: float | None = None
    note: str = ""


def describe(name: str, column: Column) -> Field:
    """The field that a column is."""
    if isinstance(column, Padded):
        whole, real = describe(name, column.column), describe(name, column.values)
        return attrs.evolve(real, shape=whole.shape)
    if isinstance(column, torch.Tensor):
        dtype = str(column.dtype).removeprefix("torch.")
        if column.is_nested:
            parts = column.unbind()
            lengths = [part.shape[0] if part.dim() else 1 for part in parts]
            flat = np.concatenate([_flat(part) for part in parts] or [np.empty(0)])
            return Field(name, "ragged tensor", _ragged(lengths), dtype, **_figures(flat))
        shape = "x".join(map(str, column.shape))
        return Field(name, "tensor", shape, dtype, **_figures(_flat(column)))
    if isinstance(column, np.ndarray) and column.dtype != object:
        shape = "x".join(map(str, column.shape))
        return Field(name, "array", shape, str(column.dtype), **_figures(column.reshape(-1)))
    cells = values(column)
    kinds = sorted({type(cell).__name__ for cell in cells})
    dtype = ", ".join(kinds[:3])
    if all(isinstance(cell, list) for cell in cells) and cells:
        flat_list = [v for cell in cells for v in cell]
        if flat_list and all(isinstance(v, int | float) for v in flat_list):
            shape = _ragged([len(cell) for cell in cells])
            return Field(name, "lists", shape, "numbers", **_figures(np.array(flat_list)))
    if cells and all(isinstance(cell, int | float) for cell in cells):
        return Field(name, "list", str(len(cells)), dtype, **_figures(np.array(cells)))
    note = f"{len(set(cells))} distinct" if kinds == ["str"] else ""
    return Field(name, "objects", str(len(cells)), dtype, note=note)


def _flat(tensor: torch.Tensor) -> np.ndarray:
    """The numbers of a tensor; as float32 if numpy lacks their dtype (bfloat16, float8)."""
    flat = tensor.detach().reshape(-1)
    try:
        return flat.numpy()  # type: ignore[no-any-return, unused-ignore]
    except TypeError:
        return flat.to(torch.complex64 if flat.is_complex() else torch.float32).numpy()  # type: ignore[no-any-return, unused-ignore]


def _ragged(lengths: Sequence[int]) -> str:
    if not lengths:
        return "0"
    low, high = min(lengths), max(lengths)
    return f"{len(lengths)}x{low}" + (f"..{high}" if high > low else "")


def _figures(flat: np.ndarray) -> dict[str, Any]:
    if flat.dtype.kind not in "biuf" or not flat.size:
        return {"note": "empty" if not flat.size else ""}
    wide = flat.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    note = f"{wide.size - finite.size} not finite" if finite.size < wide.size else ""
    if not finite.size:
        return {"note": note}
    whole = flat.dtype.kind in "biu"
    low, high = finite.min(), finite.max()
    return {
        "min": int(low) if whole else float(low),
        "mean": float(finite.mean()),
        "max": int(high) if whole else float(high),
        "note": note,
    }
