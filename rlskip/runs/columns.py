"""Rollouts of any trainer as columns: what each of them holds, and which rows these are."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import xxhash

from rlskip.batch import columns as batches
from rlskip.batch.padding import Misfit
from rlskip.batch.ragged import numbers
from rlskip.batch.row_fields import RowFields
from rlskip.batch.rows import RecordError, RowColumns, Rows
from rlskip.batch.tables import loaded
from rlskip.keys import split_trajectory

QUEUE_PART = {"groups", "keys", "fields"}
"""The keys of what role rollout_tq dumps."""

Column = Any  # an array or a sequence: one value a row
_PLAIN = {type(None), bool, int, float, str}


@attrs.frozen
class Columns:
    """Columns of `n` values, `whole`, what belongs to the batch, and what `fields` these hold."""

    n: int
    columns: Mapping[str, Column]
    whole: Mapping[str, Any]
    fields: RowFields

    def name_of(self, what: str) -> str | None:
        """The name of the column that holds `what` (an entry of RowFields); None without one."""
        name = getattr(self.fields, what)
        return name if name in self.columns else None

    def of(self, what: str) -> Sequence[Any] | None:
        """The values of the column that holds `what`, or of an entry of it; None without one."""
        name = getattr(self.fields, what)
        return None if name is None else batches.values_at(self.columns, name)

    def array(self, what: str) -> np.ndarray | None:
        """The column that holds `what`, if it is an array of real numbers."""
        column = self.columns.get(self.name_of(what) or "")
        return column if isinstance(column, np.ndarray) and column.dtype.kind in "biuf" else None

    def scalars(self, what: str) -> list[Any] | None:
        """The values of `what`, if they are a text or a whole number for each row."""
        if (column := self.of(what)) is None:
            return None
        cells = [single(value) for value in column]
        return cells if all(isinstance(cell, str | int) for cell in cells) else None


def rollout_columns(
    rollouts: Any, fields: RowFields | None = None, n: int | None = None
) -> Columns:
    """Columns of a DataProto, a TensorDict, a mapping, a queue's part or a list of rows.

    The columns within a mapping that is a field have its name before theirs: ``extra.score``.
    Without `fields` their names tell what they hold, and without `n` how many rows there are.
    """
    batch, named = rollouts, batches.columns_of(rollouts)
    whole: dict[str, Any] = {}
    if isinstance(rollouts, dict) and rollouts.keys() == QUEUE_PART:
        batch, whole = rollouts["fields"], {"groups": rollouts["groups"]}
        named = {"key": rollouts["keys"], **batches.columns_of(batch)}
    elif batches.is_data_proto(rollouts):
        whole = {"meta_info": rollouts.meta_info}
    elif not named and isinstance(rollouts, list | tuple):
        named = {"value": list(rollouts)}
    elif not named and not isinstance(rollouts, Mapping):
        whole = {"value": rollouts}
    n = _length_of(batch, fields or RowFields.of(named)) if n is None else n
    columns: dict[str, Column] = {}
    for name, column in named.items():
        within = column if n and isinstance(column, dict) else {}
        if batches.column_length(column) == n:
            columns[str(name)] = column
        elif within and all(batches.column_length(one) == n for one in within.values()):
            columns |= {f"{name}.{key}": column[key] for key in column}
        else:
            whole.setdefault(str(name), batches.unwrapped(column))
    if fields is None:
        fields, every = RowFields.of(columns.keys()), RowFields.of([*columns, *whole])
        # What has values of other rows is not absent.
        for what in ("mask", "log_probs"):
            if getattr(fields, what) is None:
                fields = attrs.evolve(fields, **{what: getattr(every, what)})
    return Columns(n, columns, whole, fields)


def _length_of(batch: Any, fields: RowFields) -> int:
    """How many rows there are: as many as responses, where a mapping has columns of any length."""
    if isinstance(batch, Mapping) and not batches.is_tensordict(batch):
        for name in (fields.response, fields.whole):
            if name in batch and (n := batches.column_length(batch[name])) is not None:
                return n
    return batches.length_of(batch)


def values(column: Column) -> Sequence[Any]:
    """One value for each row."""
    return batches.cells_of(column) or ()


def plain(value: Any) -> Any:
    """A cell as plain values of Python: numbers, text, lists and dicts."""
    if type(value) in _PLAIN:
        return value
    value = batches.unwrapped(value)
    if batches.is_tensordict(value):
        value = batches.columns_of(value)
    if isinstance(value, np.ndarray | np.generic) or batches.is_tensor(value):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, loaded("PIL.Image", "Image")):  # its own text has an address in memory
        size = "x".join(map(str, value.size))
        return f"<image {value.mode} {size} {xxhash.xxh3_64_hexdigest(value.tobytes())}>"
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def single(value: Any) -> Any:
    """A cell that holds one value as that value; any other as it is."""
    is_single = isinstance(value, np.ndarray | np.generic) and value.size == 1
    return value.item() if is_single else value


Cells = Sequence[np.ndarray | None]
"""An array of one dimension for each row; None where a row has no such value."""


@attrs.frozen(eq=False)
class Tokens:
    """For each row its prompt and its response, as :class:`~rlskip.batch.rows.Rows` has them.

    ``mask`` tells which tokens of the response were sampled. What the columns do not have is None,
    and so is what does not fit the tokens: the `misfits`. `rewards` has where in each row's rewards
    those of its response are, if it has one for each token.
    """

    prompt: Sequence[np.ndarray] | None = None
    response: Sequence[np.ndarray] | None = None
    mask: Cells | None = None
    log_probs: Cells | None = None
    rows: Rows | None = None
    rewards: Sequence[tuple[int, int] | None] = ()
    misfits: Sequence[Misfit] = ()

    @classmethod
    def of(cls, columns: Columns) -> Tokens:
        """Those that the columns hold: neither text, nor numbers that are not tokens."""
        try:
            # What has no value for each row may be a mask of other rows.
            found = RowColumns.of({**columns.whole, **columns.columns}, columns.fields)
            rows = Rows.of(found)
        except RecordError:
            return cls()
        spans, misfits = rows.spans(found, "log_probs")
        rewards, more = rows.spans(found, "reward")
        mask = probs = None
        if rows.mask is not None:
            mask = [c if g else None for c, g in zip(rows.mask.cells, rows.mask.given, strict=True)]
        if (given := columns.of("log_probs")) is not None and len(given) == len(spans):
            probs, name = list(map(_cut, given, spans)), found.names["log_probs"]
            known = {odd.row for odd in misfits}
            for i, (cell, read) in enumerate(zip(given, probs, strict=True)):
                if read is None and cell is not None and i not in known:
                    misfits.append(Misfit("log_probs", name, i, None, len(rows.response.cells[i])))
        return cls(
            rows.prompt.cells if rows.has_prompts else None,
            rows.response.cells,
            mask,
            probs,
            rows,
            rewards,
            [*rows.misfits, *misfits, *more],
        )


def _cut(cell: object, span: tuple[int, int] | None) -> np.ndarray | None:
    found = None if span is None else numbers(cell)
    return None if found is None or span is None else found[slice(*span)]


def total_of(value: Any, span: tuple[int, int] | None) -> float | None:
    """A reward as one number: of one for each token the sum, without what padding has."""
    if isinstance(value, int | float):
        return float(value) if isinstance(value, float) or abs(value) < 2**1023 else None
    if (given := numbers(value)) is None:
        return None
    return float(given[slice(*span) if span else slice(None)].sum(dtype=np.float64))


def row_names(columns: Columns, tokens: Tokens) -> list[tuple[str, Any, Any]]:
    """Group, session and turn of each row.

    Keys of a queue say so, or columns of group and session, or trajectory ids (SkyRL), or rows that
    are a session's last; else each row is a session. Groups are those of the key, of the column of
    groups, of as many rows as each prompt has, or of equal prompts.
    """
    n = columns.n
    keys = [split_trajectory(str(key)) for key in values(columns.columns.get("key", ()))]
    if len(keys) == n and all(keys):
        return [key for key in keys if key is not None]
    group, session, turn = _groups(columns), columns.scalars("session"), columns.scalars("turn")
    turns = turn if turn and all(isinstance(t, int) for t in turn) else [0] * n
    if group and session:
        return list(zip(group, session, turns, strict=True))
    if session and columns.name_of("session") == "trajectory_ids":  # SkyRL's, as text
        ids = [str(one) for one in session]
        heads = [one.rpartition("_")[0] or one for one in ids]
        return list(zip(heads, ids, turns, strict=True))
    each = columns.fields.n
    groups = group or ([str(i // each) for i in range(n)] if each else _prompts(tokens, n))
    last = columns.scalars("last") or [True] * n
    first, names = 0, []
    for i in range(n):
        names.append((groups[first], first, turns[i]))
        first = i + 1 if last[i] else first
    return names


def _groups(columns: Columns) -> list[str] | None:
    """The name of each row's group, by the column of groups: its text, or its number there."""
    column, names = columns.of("group"), columns.scalars("group")
    if column is None or names is not None:
        return names and list(map(str, names))
    return _numbered(repr(plain(value)) for value in column)


def _prompts(tokens: Tokens, n: int) -> list[str]:
    """For each row the number of its prompt among the prompts that differ."""
    if tokens.prompt is not None:
        return _numbered(p.astype(np.int64).tobytes() for p in tokens.prompt)
    # Responses without prompts are those of one group.
    return [str(i) if tokens.response is None else "0" for i in range(n)]


def _numbered(values: Iterable[Hashable]) -> list[str]:
    """The number of each value among those that differ, in the order of their first ones."""
    found: dict[Hashable, int] = {}
    return [str(found.setdefault(value, len(found))) for value in values]
