"""`rlskip show STEP`: what a dump says of itself, its fields, and a few of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch
from rich.console import RenderableType

from rlskip.cli.dumps import Dump, Target
from rlskip.cli.rows import Column, Columns, Decoder, Row, columns_of, plain, rows_of, values
from rlskip.cli.screen import Answer, age, duration, facts, number, short, size, table, text
from rlskip.store import DumpMeta

_SHOWN = 400  # characters of a cell


@attrs.frozen
class Field:
    """One field of the rollouts. Figures are over all its numbers, None where it has none.

    ``shape`` of a ragged field gives the range of the lengths: ``4x3..8``.
    """

    name: str
    kind: str
    shape: str
    dtype: str
    min: float | None = None
    mean: float | None = None
    max: float | None = None
    note: str = ""


def show(target: Target, rows: int, decoder: Decoder | None) -> Answer:
    """All dumps of `target` (a step has several where it has mini-batches or shards)."""
    data, view = [], []
    for dump in target.dumps():
        columns = columns_of(dump.load())
        fields = [describe(name, column) for name, column in columns.columns.items()]
        beside = {name: plain(value) for name, value in columns.beside.items()}
        said = _rows(columns, rows, decoder)
        meta = dump.meta
        data.append(
            {
                "dump": dump.name,
                "directory": str(dump.place.directory),
                "meta": attrs.asdict(meta) if meta else None,
                "rows": columns.n,
                "fields": [attrs.asdict(field) for field in fields],
                "beside": beside,
                "sample": said,
            }
        )
        view += _view(target, dump, meta, columns, fields, said)
    return Answer(data, view)


# -- fields ----------------------------------------------------------------------------------


def describe(name: str, column: Column) -> Field:
    """Kind, shape, dtype and figures of one column."""
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
    note = ""
    if kinds == ["str"]:
        note = f"{len(set(cells))} distinct"
    return Field(name, "objects", str(len(cells)), dtype, note=note)


def _flat(tensor: torch.Tensor) -> np.ndarray:
    """Its numbers; those that numpy has no dtype for (bfloat16, float8) as float32."""
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


# -- rows ------------------------------------------------------------------------------------


def _rows(columns: Columns, limit: int, decoder: Decoder | None) -> list[dict[str, Any]]:
    rows = rows_of(columns, limit)
    if not rows:
        cells = {name: values(column) for name, column in columns.columns.items()}
        return [
            {name: plain(column[i]) for name, column in cells.items()}
            for i in range(min(limit, columns.n))
        ]
    said = [attrs.asdict(row) for row in rows]
    if decoder is not None:
        for row, line in zip(rows, said, strict=True):
            line["prompt_text"] = decoder(row.prompt)
            line["response_text"] = decoder(row.response)
    return said


# -- for people ------------------------------------------------------------------------------


def _view(
    target: Target,
    dump: Dump,
    meta: DumpMeta | None,
    columns: Columns,
    fields: list[Field],
    said: list[dict[str, Any]],
) -> list[RenderableType]:
    shown = table("field", "kind", ">shape", "dtype", ">min", ">mean", ">max", "")
    for field in fields:
        shown.add_row(
            text(field.name),
            field.kind,
            field.shape,
            text(field.dtype),
            number(field.min),
            number(field.mean),
            number(field.max),
            text(field.note, "dim"),
        )
    view: list[RenderableType] = [_head(target, dump, meta, columns), text(""), shown]
    beside = [(name, short(str(plain(v)), _SHOWN)) for name, v in columns.beside.items()]
    if beside:
        view += [facts(beside), text("")]
    return view + [part for line in said for part in _row_view(line)]


def _head(target: Target, dump: Dump, meta: DumpMeta | None, columns: Columns) -> RenderableType:
    pairs: list[tuple[str, Any]] = [
        ("dump", f"{target.run.name}/{dump.name}"),
        ("rows", columns.n),
        ("on disk", size(dump.size)),
    ]
    if meta is not None:
        seconds = meta.info.get("seconds") or None  # 0: imported, nobody knows
        pairs += [
            ("in memory", size(meta.nbytes)),
            ("written", f"{meta.created} ({age(dump.written)} ago)"),
            ("by job", meta.info.get("job")),
            ("imported", meta.info.get("imported")),
            ("generated in", None if seconds is None else duration(seconds)),
            ("made from", _identity(meta)),
        ]
    return facts(pairs)


def _identity(meta: DumpMeta) -> str:
    found = meta.identity
    if found is None:
        return "not recorded: it is replayed without a comparison"
    said = {"prompts": found.prompts, "n": found.n, "prompt_len": found.prompt_len}
    said |= {"response_len": found.response_len, **found.sampling, **found.extra}
    said |= {"model": found.model}
    return ", ".join(f"{name} {value}" for name, value in said.items() if value is not None)


def _row_view(line: dict[str, Any]) -> list[RenderableType]:
    if "response" not in line:
        return [facts((name, short(str(value), _SHOWN)) for name, value in line.items())]
    row = Row(**{f.name: line[f.name] for f in attrs.fields(Row)})
    head = f"row {row.index}" + (f", uid {row.uid}" if row.uid else "")
    if row.reward is not None:
        head += f", reward {number(row.reward)}"
    pairs: list[tuple[str, Any]] = [
        ("  prompt", short(line.get("prompt_text") or _tokens(row.prompt), _SHOWN)),
        ("  response", short(line.get("response_text") or _tokens(row.response), _SHOWN)),
    ]
    if row.mask is not None and not all(row.mask):
        pairs.append(("  sampled", f"{sum(row.mask)} of {len(row.response)} tokens"))
    if row.log_probs:
        mean = sum(row.log_probs) / len(row.log_probs)
        pairs.append(("  log-prob", f"{mean:.3f} on average"))
    return [text(head, "bold"), facts(pairs)]


def _tokens(tokens: list[int]) -> str:
    return f"{' '.join(map(str, tokens))}  ({len(tokens)} tokens)"
