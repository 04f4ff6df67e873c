"""Which group, session and turn each row of rollouts is."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np

from rlskip.keys import split_trajectory
from rlskip.runs.columns import Columns, plain, values
from rlskip.runs.tokens import Tokens


def row_names(columns: Columns, tokens: Tokens) -> list[tuple[str, Any, Any]]:
    """Group, session and turn of each row.

    Rows belong to one session if their keys say so (a queue's), or their columns of group and
    session, or their trajectory ids (SkyRL), or if no earlier row is a session's last step. Else
    each row is a session. Groups are those of the key, of the column of groups, of as many rows as
    each prompt has, or of equal prompts.
    """
    n = columns.n
    keys = [split_trajectory(str(key)) for key in values(columns.columns.get("key", ()))]
    if len(keys) == n and all(keys):
        return [key for key in keys if key is not None]
    group, session, turn = (
        _groups(columns),
        _scalars(columns, "session"),
        _scalars(columns, "turn"),
    )
    turns = turn if turn and all(isinstance(t, int) for t in turn) else [0] * n
    if group and session:
        return list(zip(group, session, turns, strict=True))
    if session and columns.name_of("session") == "trajectory_ids":  # SkyRL's, as text
        ids = [str(one) for one in session]
        heads = [one.rpartition("_")[0] or one for one in ids]
        return list(zip(heads, ids, turns, strict=True))
    each = columns.fields.n
    groups = group or ([str(i // each) for i in range(n)] if each else _prompts(tokens, n))
    last = _scalars(columns, "last") or [True] * n
    first, names = 0, []
    for i in range(n):
        names.append((groups[first], first, turns[i]))
        first = i + 1 if last[i] else first
    return names


def _groups(columns: Columns) -> list[str] | None:
    """The name of each row's group, by the column of groups: its text, or its number there."""
    column, names = columns.of("group"), _scalars(columns, "group")
    if column is None or names is not None:
        return names and list(map(str, names))
    return _numbered(repr(plain(value)) for value in column)


def _prompts(tokens: Tokens, n: int) -> list[str]:
    """For each row the number of its prompt among the prompts that differ."""
    if tokens.prompt is None:
        alike = tokens.response is not None  # responses without prompts are those of one group
        return [str(0 if alike else i) for i in range(n)]
    return _numbered(b"" if p is None else p.astype(np.int64).tobytes() for p in tokens.prompt)


def _numbered(values: Iterable[Hashable]) -> list[str]:
    """The number of each value among those that differ, in the order of their first ones."""
    found: dict[Hashable, int] = {}
    return [str(found.setdefault(value, len(found))) for value in values]


def single(value: Any) -> Any:
    """A cell that holds one value as that value; any other as it is."""
    is_single = isinstance(value, np.ndarray | np.generic) and value.size == 1
    return value.item() if is_single else value


def _scalars(columns: Columns, what: str) -> list[Any] | None:
    """The column that holds `what`, if it has a text or a whole number for each row."""
    column = columns.of(what)
    if column is None:
        return None
    cells = [single(v) for v in column]
    return cells if all(isinstance(v, str | int) for v in cells) else None
