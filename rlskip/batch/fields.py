"""Fields of a result, by name."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

from rlskip.batch.columns import columns_of, is_data_proto, is_tensordict
from rlskip.batch.tables import Table

# Names under which trainers keep what a reward function returned.
_SCORES = {"rm_scores", "token_level_scores", "token_level_rewards", "scores", "rewards", "reward"}


def field_names(batch: Any) -> set[str]:
    """Names of the fields of a batch; empty for other values."""
    return set(batch.keys()) if is_tensordict(batch) else {str(name) for name in columns_of(batch)}


def score_fields(batch: Any) -> list[str]:
    """The fields that hold scores, sorted."""
    return sorted(field_names(batch) & _SCORES)


def drop_fields(batch: Any, names: Collection[str]) -> Any:
    """`batch` without the fields in `names`; the same object when there is nothing to drop."""
    names = set(names) & field_names(batch)
    if not names:
        return batch
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
