"""Fields of a result, whatever kind of batch it is."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from tensordict import TensorDictBase

# Names under which trainers keep what a reward function said.
_SCORES = {"rm_scores", "token_level_scores", "token_level_rewards", "scores", "rewards", "reward"}


def field_names(batch: Any) -> set[str]:
    """Names of the top-level fields of a TensorDict, a mapping or a DataProto; else none."""
    if isinstance(batch, TensorDictBase):
        return {str(key) for key in batch.keys()}  # noqa: SIM118 - iterating a TensorDict gives rows
    if isinstance(batch, Mapping):
        return {str(key) for key in batch}
    if _is_data_proto(batch):
        tensors = set() if batch.batch is None else field_names(batch.batch)
        return tensors | {str(key) for key in batch.non_tensor_batch}
    return set()


def score_fields(batch: Any) -> list[str]:
    """The fields that hold scores, sorted."""
    return sorted(field_names(batch) & _SCORES)


def drop_fields(batch: Any, names: Collection[str]) -> Any:
    """`batch` without the fields in `names`; the same object when there is nothing to drop."""
    names = set(names) & field_names(batch)
    if not names:
        return batch
    if isinstance(batch, TensorDictBase):
        return batch.exclude(*names)
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key not in names}
    kept = copy.copy(batch)
    kept.batch = None if batch.batch is None else drop_fields(batch.batch, names)
    kept.non_tensor_batch = drop_fields(batch.non_tensor_batch, names)
    return kept


def _is_data_proto(batch: Any) -> bool:
    """verl's DataProto, recognised by its parts: verl need not be importable."""
    return all(hasattr(batch, name) for name in ("batch", "non_tensor_batch", "meta_info"))
