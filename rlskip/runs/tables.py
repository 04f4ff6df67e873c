"""Rollouts for other programs: tables of pyarrow, Parquet, lines of JSON, chat messages."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlskip._human import finite
from rlskip.batch.tables import Ragged
from rlskip.errors import RlskipError
from rlskip.format.fingerprint import is_number
from rlskip.runs.columns import Column, plain, values
from rlskip.runs.conversation import to_text
from rlskip.runs.rollouts import ROW, TEXTS, TOKENS, Rollouts, SessionRows

if TYPE_CHECKING:
    import pyarrow as pa


def extra(module: str) -> Any:
    """A module that the extra `data` brings; raises RlskipError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        what = f"this needs {module}"
        raise RlskipError(what, remedy="pip install 'rlskip[data]'") from error


def joined(found: Sequence[pa.Table]) -> pa.Table:
    """One table; a column that some of them lack is null there.

    Raises RlskipError where no type holds all values of a column.
    """
    pa = extra("pyarrow")
    try:
        return pa.concat_tables(found, promote_options="permissive") if found else pa.table({})
    except pa.ArrowException as error:
        what = f"a column has values of other kinds than in dumps before: {error}"
        raise RlskipError(what, "", "choose fields, or read the steps one by one") from error


def table_of(rollouts: Rollouts) -> pa.Table:
    """A table of a dump, a row for each row of its rollouts."""
    pa = extra("pyarrow")
    # The types of keys that are not lists, whatever the values are.
    types = dict.fromkeys(("step", "call", "rank", "row", "session", "turn"), pa.int64())
    types |= dict.fromkeys(("run", "group", "uid", *TEXTS), pa.string()) | {"reward": pa.float64()}
    n = len(rollouts)
    columns = {name: pa.array([v] * n, types[name]) for name, v in rollouts.place.items()}
    for name in rollouts.names:
        if name in TOKENS:
            dtype = bool if name == "mask" else None
            columns[name] = _lists(pa, getattr(rollouts.tokens, name), n, dtype)
        elif name in ROW or name in TEXTS:
            cells = [_utf8(rollouts.cell(name, i)) for i in range(n)]
            columns[name] = pa.array(cells, types[name])
        else:
            columns[name] = _own(pa, rollouts.column(name))
    return pa.table(columns)


def _lists(pa: Any, cells: Sequence[np.ndarray | None] | None, n: int, dtype: Any = None) -> Any:
    """A list for each row, in one copy; null where there is none."""
    given = [cell for cell in cells or () if cell is not None]
    if not given:
        return pa.nulls(n)
    offsets = np.zeros(n + 1, np.int32)
    np.cumsum([0 if cell is None else len(cell) for cell in cells or ()], out=offsets[1:])
    missing = None if len(given) == n else pa.array([cell is None for cell in cells or ()])
    dtype = np.dtype(dtype or np.result_type(*map(_dumped, {cell.dtype for cell in given})))
    # Arrow keeps the memory of tables that are gone, for those to come.
    memory = pa.allocate_buffer(int(offsets[-1]) * dtype.itemsize)
    flat = np.frombuffer(memory, dtype)
    np.concatenate(given, out=flat, casting="unsafe")
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat), mask=missing)


def _own(pa: Any, column: Column) -> Any:
    """A trainer's own column; what Arrow has no type for is text in JSON."""
    if isinstance(column, np.ndarray) and column.dtype.kind in "biuf" and is_number(column):
        if column.ndim == 1:
            return pa.array(column.astype(_dumped(column.dtype), copy=False))
        column = Ragged(column)
    if isinstance(column, Ragged) and all(p.ndim == 1 and p.dtype.kind in "biuf" for p in column):
        return _lists(pa, column, len(column))
    cells = [_utf8(plain(cell)) for cell in values(column)]
    try:
        found = pa.array(cells)
        # Parquet has no type for mappings without entries.
        return found if "struct<>" not in str(found.type) else pa.array(list(map(_filled, cells)))
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        return pa.array([json.dumps(finite(cell)) for cell in cells], pa.string())


def _filled(value: Any) -> Any:
    """A value with None for each mapping without entries."""
    if isinstance(value, dict):
        return {name: _filled(item) for name, item in value.items()} or None
    return [_filled(item) for item in value] if isinstance(value, list) else value


def _dumped(dtype: np.dtype) -> np.dtype:
    """What a column's dtype was before its integers were read narrower, in this byte order."""
    noted: Any = dtype.metadata or {}
    is_narrow = dtype.kind in "iu" and "torch" in noted
    dumped: np.dtype = np.dtype(noted["torch"] if is_narrow else dtype.str).newbyteorder("=")
    return dumped


def line(value: Any) -> str:
    """`value` on one line. JSON has no NaN and no infinity: null is written."""
    encoded: str = _utf8(json.dumps(finite(value), ensure_ascii=False, allow_nan=False))
    return encoded


def _utf8(value: Any) -> Any:
    """A text with its lone surrogates, which a tokenizer may leave, escaped; else the value."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def chats(sessions: Iterable[SessionRows]) -> Iterator[str]:
    """A line for each session: its chat messages, its reward, and where it is."""
    for session in sessions:
        messages = session.messages
        if messages is None:
            what = "it records no chat messages, and token ids are not text"
            raise RlskipError(what, session.where, to_text(session.turns[-1]))
        about = {"group": session.group, "session": session.number, "reward": session.reward}
        yield line({"messages": messages, **session.place, **about})
