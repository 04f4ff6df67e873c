"""Rollouts of any trainer as columns, with what each of them holds.

A dump describes that (:class:`~rlskip.batch.row_fields.RowFields`); columns of a dump that does not
have their usual names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import xxhash

from rlskip.batch import columns as batches
from rlskip.batch.row_fields import RowFields
from rlskip.batch.tables import loaded

QUEUE_PART = {"groups", "keys", "fields"}
"""The keys of what role rollout_tq dumps."""

Column = Any  # an array or a sequence: one value a row


@attrs.frozen
class Columns:
    """Rollouts as columns of `n` values each, and `whole`: what belongs to the whole batch.

    `fields` tells what the columns hold.
    """

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
        """The column that holds `what`, if it is an array of numbers; complex ones are none."""
        name = self.name_of(what)
        column = None if name is None else self.columns[name]
        return column if isinstance(column, np.ndarray) and column.dtype.kind in "biuf" else None


def rollout_columns(
    rollouts: Any, fields: RowFields | None = None, n: int | None = None
) -> Columns:
    """Columns of a DataProto, a TensorDict, a mapping, a queue's part or a list of rows.

    The columns within a mapping that is a field have its name before theirs: ``extra.score``.
    `fields` tell what they hold; None, for dumps that do not describe themselves: as their names
    are usual. There are `n` rows, where more is known of that than these columns tell.
    """
    batch, named = rollouts, batches.columns_of(rollouts)
    whole: dict[str, Any] = {}
    if is_queue_part(rollouts):
        batch, whole = rollouts["fields"], {"groups": rollouts["groups"]}
        named = {"key": rollouts["keys"], **batches.columns_of(batch)}
    elif batches.is_data_proto(rollouts):
        whole = {"meta_info": rollouts.meta_info}
    elif not named and isinstance(rollouts, list | tuple):
        named = {"value": list(rollouts)}
    elif not named and not isinstance(rollouts, Mapping):
        whole = {"value": rollouts}
    if n is None:
        n = _length_of(batch, fields or RowFields.of(named))
    columns: dict[str, Column] = {}
    for name, column in named.items():
        if batches.column_length(column) == n:
            columns[str(name)] = column
        elif _holds_columns(column, n):
            columns |= {f"{name}.{key}": column[key] for key in column}
        else:
            whole.setdefault(str(name), batches.unwrapped(column))
    return Columns(n, columns, whole, fields or RowFields.of(columns.keys()))


def _length_of(batch: Any, fields: RowFields) -> int:
    """How many rows there are: as many as responses, where a mapping has columns of any length."""
    if isinstance(batch, Mapping):
        for name in (fields.response, fields.whole):
            if name in batch and (n := batches.column_length(batch[name])) is not None:
                return n
    return batches.length_of(batch)


def _holds_columns(value: Any, n: int) -> bool:
    if not isinstance(value, dict) or not value or not n:
        return False
    return all(batches.column_length(column) == n for column in value.values())


def is_queue_part(rollouts: Any) -> bool:
    """Whether `rollouts` are what role rollout_tq dumps."""
    return isinstance(rollouts, dict) and rollouts.keys() == QUEUE_PART


def values(column: Column) -> Sequence[Any]:
    """One value for each row."""
    return batches.cells_of(column) or ()


def plain(value: Any) -> Any:
    """A cell as plain values of Python: numbers, text, lists and dicts."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, loaded("PIL.Image", "Image")):  # its own text has an address in memory
        size = "x".join(map(str, value.size))
        return f"<image {value.mode} {size} {xxhash.xxh3_64_hexdigest(value.tobytes())}>"
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
