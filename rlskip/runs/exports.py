"""Rollouts for other programs: lines of JSON, chat messages, Parquet."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlskip._human import finite
from rlskip.errors import RlskipError
from rlskip.runs.scope import Scope
from rlskip.runs.tables import By, extra

if TYPE_CHECKING:
    import pyarrow as pa

_SURROGATE = re.compile("[\ud800-\udfff]")


def line(value: Any) -> str:
    """`value` on one line. JSON has no NaN and no infinity: null is written."""
    encoded = json.dumps(finite(value), ensure_ascii=False, allow_nan=False)
    # A lone surrogate, which a tokenizer may leave, has no UTF-8 form but can be escaped.
    return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", encoded)


def write_parquet(target: Scope, out: Path, by: By) -> int:
    """Write a table, a row group for each dump, and return the number of its rows.

    Its columns are those of the first dump. Where a later one has others, or others of another
    type, all are read once more for the columns of all; what a dump lacks is null in its rows.

    Raises
    ------
    RlskipError
        A column has types that no one type holds.
    """
    schema: pa.Schema | None = None
    while True:
        rows, written, schema = _write_tables(target, out, by, schema)
        if written == schema:
            return rows


def _write_tables(
    target: Scope, out: Path, by: By, schema: pa.Schema | None
) -> tuple[int, pa.Schema | None, pa.Schema | None]:
    """How many rows were written, with which schema (by default the first table's), and all's.

    From the first table on that the schema does not hold, nothing is written.
    """
    pa, pq, writer, rows = extra("pyarrow"), extra("pyarrow.parquet"), None, 0
    every = schema
    try:
        for table in _tables(target, by):
            schema, every = schema or table.schema, every or table.schema
            try:
                both = [every, table.schema]
                every = pa.unify_schemas(both, promote_options="permissive")
                if every != schema:
                    continue
                for name in set(schema.names) - set(table.column_names):
                    nulls = pa.nulls(table.num_rows, schema.field(name).type)
                    table = table.append_column(name, nulls)
                table = table.select(schema.names).cast(schema)
            except pa.ArrowException as error:
                what = f"its columns do not fit those before: {str(error).partition(chr(10))[0]}"
                step = table["step"][0].as_py() if table.num_rows else "?"
                remedy = "export the steps in several files"
                raise RlskipError(what, f"step {step}", remedy) from error
            writer = writer or pq.ParquetWriter(out, schema)
            writer.write_table(table)
            rows += table.num_rows
    finally:
        if writer is not None:
            writer.close()
    return rows, schema, every


def _tables(target: Scope, by: By) -> Iterator[pa.Table]:
    """A table for each dump, with null for mappings that are all empty, which Parquet lacks."""
    pa = extra("pyarrow")

    def kept(dtype: Any) -> Any:
        if pa.types.is_list(dtype):
            return pa.list_(kept(dtype.value_type))
        if not pa.types.is_struct(dtype):
            return dtype
        fields = [field.with_type(kept(field.type)) for field in dtype]
        return pa.struct(fields) if fields else pa.null()

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: filled(item) for name, item in value.items()} or None
        return [filled(item) for item in value] if isinstance(value, list) else value

    for table in target.iter_tables(by=by):
        for i, field in enumerate(table.schema):
            if (dtype := kept(field.type)) != field.type:
                cells = [filled(cell) for cell in table[i].to_pylist()]
                table = table.set_column(i, field.name, pa.array(cells, dtype))
        yield table


def chats(target: Scope) -> Iterator[str]:
    """A line for each session: its chat messages, its reward, and where it is.

    Raises
    ------
    RlskipError
        A session has no chat messages, and no tokenizer makes text of its tokens.
    """
    for session in target.sessions():
        messages = session.messages
        if messages is None:
            what = "it records no chat messages, and token ids are not text"
            where = f"step {session.place['step']}, group {session.group}"
            raise RlskipError(what, where, "give the tokenizer: --tokenizer DIRECTORY")
        about = {"group": session.group, "session": session.number, "reward": session.reward}
        yield line({"messages": messages, **session.place, **about})
