"""Rollouts for other programs: lines of JSON, chat messages, Parquet."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlskip._human import finite
from rlskip.errors import RlskipError
from rlskip.runs.scope import Scope
from rlskip.runs.tables import By, extra

_SURROGATE = re.compile("[\ud800-\udfff]")


def line(value: Any) -> str:
    """`value` on one line. JSON has no NaN and no infinity: null is written."""
    encoded = json.dumps(finite(value), ensure_ascii=False, allow_nan=False)
    # A lone surrogate, which a tokenizer may leave, has no UTF-8 form but can be escaped.
    return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", encoded)


def write_parquet(target: Scope, out: Path, by: By) -> int:
    """Write a table, and return the number of its rows; a column that a dump lacks is null there.

    Mappings that are all empty, which Parquet lacks, are null, too.

    Raises
    ------
    RlskipError
        A column has types that no one type holds.
    """
    pa, table = extra("pyarrow"), target.to_arrow(by=by)

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

    for i, field in enumerate(table.schema):
        if (dtype := kept(field.type)) != field.type:
            cells = [filled(cell) for cell in table[i].to_pylist()]
            table = table.set_column(i, field.name, pa.array(cells, dtype))
    extra("pyarrow.parquet").write_table(table, out)
    return int(table.num_rows)


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
