"""Rollouts for other programs: lines of JSON, chat messages, Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlskip._human import finite
from rlskip.errors import RlskipError
from rlskip.runs.opened import Scope
from rlskip.runs.tables import extra


def line(value: Any) -> str:
    """`value` on one line. JSON has no NaN and no infinity: null is written."""
    encoded = json.dumps(finite(value), ensure_ascii=False, allow_nan=False)
    # A lone surrogate, which a tokenizer may leave, has no UTF-8 form but can be escaped.
    return encoded.encode("utf-8", "backslashreplace").decode()


def write_parquet(target: Scope, out: Path) -> int:
    """Write the table of :meth:`Scope.to_arrow`, and return the number of its rows."""
    table = target.to_arrow()
    extra("pyarrow.parquet").write_table(table, out)
    return int(table.num_rows)


def chats(target: Scope) -> Iterator[str]:
    """A line for each session: its chat messages, its reward, and where it is.

    Raises RlskipError where a session has none, and no tokenizer makes text of its tokens.
    """
    for session in target.sessions():
        messages = session.messages
        if messages is None:
            what = "it records no chat messages, and token ids are not text"
            where = f"step {session.place['step']}, group {session.group}"
            raise RlskipError(what, where, "give the tokenizer: --tokenizer DIRECTORY")
        about = {"group": session.group, "session": session.number, "reward": session.reward}
        yield line({"messages": messages, **session.place, **about})
