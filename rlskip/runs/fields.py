"""The fields of a dump: kind, shape, dtype, and the range of their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from rlskip.batch.tables import Ragged
from rlskip.runs.columns import Column, Columns, values
from rlskip.runs.tokens import Tokens, without_padding

_NO_FIGURES: dict[str, Any] = {"min": None, "mean": None, "max": None, "note": ""}


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


def fields_of(columns: Columns) -> list[Field]:
    """The field that each column is."""
    found, tokens = [], Tokens.of(columns)
    for name, column in columns.columns.items():
        field, real = describe(name, column), without_padding(columns, tokens, name)
        if real is not None:
            field = attrs.evolve(field, **_NO_FIGURES | _figures(real))
        found.append(field)
    return found


def describe(name: str, column: Column) -> Field:
    """The field that a column is, padding included."""
    if isinstance(column, Ragged):
        lengths = [len(part) if part.ndim else 1 for part in column]
        flat = np.concatenate([part.reshape(-1) for part in column] or [np.empty(0)])
        dtype = _dtype_of(column[0]) if column else ""
        return Field(name, "ragged tensor", _ragged(lengths), dtype, **_figures(flat))
    if isinstance(column, np.ndarray) and column.dtype != object:
        kind = "tensor" if column.dtype.metadata else "array"
        shape = "x".join(map(str, column.shape))
        return Field(name, kind, shape, _dtype_of(column), **_figures(column.reshape(-1)))
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


def _dtype_of(array: np.ndarray) -> str:
    """The dtype of the tensor that was dumped, which numpy may lack; else the array's."""
    noted: Any = array.dtype.metadata or {}
    return str(noted.get("torch", array.dtype))


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
