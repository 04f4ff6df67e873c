"""Fields of a result, by name."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection
from typing import Any

from rlskip.batch.columns import columns_of, is_data_proto, is_tensordict
from rlskip.batch.tables import Table

# Names under which trainers keep what a reward function returned.
_SCORES = {"rm_scores", "token_level_scores", "token_level_rewards", "scores", "rewards", "reward"}


def field_names(batch: Any) -> set[str]:
    """Names of the fields of a batch, a dataclass or a named tuple; empty for other values."""
    if is_tensordict(batch):
        return set(batch.keys())
    own = _own_fields(batch)
    if own is None and isinstance(batch, list | tuple):
        own = {name for row in batch for name in _own_fields(row) or ()}
    return {str(name) for name in columns_of(batch)} | (own or set())


def _own_fields(value: Any) -> set[str] | None:
    """The fields of a dataclass or a named tuple; None for any other value."""
    if is_data_proto(value) or isinstance(value, type):  # verl's DataProto is a dataclass
        return None
    if dataclasses.is_dataclass(value):
        return {field.name for field in dataclasses.fields(value)}
    return set(value._fields) if isinstance(value, tuple) and hasattr(value, "_fields") else None


def score_fields(batch: Any) -> list[str]:
    """The fields that hold scores, sorted."""
    return sorted(field_names(batch) & _SCORES)


def drop_fields(batch: Any, names: Collection[str]) -> Any:
    """`batch` without the fields in `names`; the same object when there is nothing to drop.

    An instance of a dataclass or of a named tuple cannot lack a field: there it is None.
    """
    names = set(names) & field_names(batch)
    if not names:
        return batch
    if _own_fields(batch) is not None:
        if isinstance(batch, tuple):
            return batch._replace(**dict.fromkeys(names))  # type: ignore[attr-defined]
        kept = copy.copy(batch)
        for name in names:
            object.__setattr__(kept, name, None)  # it may be frozen
        return kept
    if is_tensordict(batch):
        return batch.exclude(*names)
    if is_data_proto(batch):
        kept = copy.copy(batch)
        kept.batch = drop_fields(batch.batch, names)
        kept.non_tensor_batch = drop_fields(batch.non_tensor_batch, names)
        return kept
    if isinstance(batch, list | tuple):
        return type(batch)(drop_fields(row, names) for row in batch)
    kept = {key: value for key, value in batch.items() if key not in names}
    return Table(kept, batch.batch_size) if isinstance(batch, Table) else kept
