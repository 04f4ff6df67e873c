"""A batch of prompts, row by row: uids, contents, and some of the rows as the same kind of batch.

A batch is a TensorDict, a mapping of columns, a sequence of mappings, or verl's DataProto
(known by its parts). A column that is not one value per prompt belongs to the whole batch.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDictBase

from rlskip.errors import RlskipError
from rlskip.store import VOLATILE, fingerprint

_UIDS = ("uid", "uids")


class PromptsError(RlskipError, ValueError):
    """Prompts that cannot be told apart."""


def uids_of(prompts: Any) -> list[str]:
    """The prompts' uids, in order; raises :class:`PromptsError` without one for each."""
    columns = _columns(prompts)
    column = next((columns[name] for name in _UIDS if name in columns), None)
    uids = _values(column) if column is not None else None
    if uids is None:
        raise PromptsError(
            f"these prompts have no uids (they are a {type(prompts).__name__})",
            remedy="give them a field `uid`, one for each; or name the argument that holds the "
            "prompts: annotate(prompts=...)",
        )
    uids = [str(uid) for uid in uids]
    if len(set(uids)) < len(uids):
        twice = sorted({uid for uid in uids if uids.count(uid) > 1})
        raise PromptsError(f"uids given twice: {', '.join(twice)}", remedy="submit each once")
    return uids


def contents_of(prompts: Any, extra: Mapping[str, Any]) -> list[str | None]:
    """A hash of each prompt and of `extra`; None where there is nothing but uids and the like."""
    n = len(uids_of(prompts))
    columns = {k: v for k, v in _columns(prompts).items() if k not in VOLATILE}
    per_row = {name: values for name, column in columns.items() if (values := _values(column, n))}
    whole = {name: column for name, column in columns.items() if name not in per_row}
    if not per_row and not extra:
        return [None] * n
    return [
        fingerprint({**whole, **{name: v[i] for name, v in per_row.items()}, "": dict(extra)})
        for i in range(n)
    ]


def select(prompts: Any, rows: Sequence[int]) -> Any:
    """These rows as a batch of the same kind; what belongs to the whole batch stays."""
    if isinstance(prompts, TensorDictBase):
        nested = {k: v for k, v in prompts.items() if isinstance(v, torch.Tensor) and v.is_nested}
        some = prompts.exclude(*nested)[list(rows)]
        for name, value in nested.items():
            tensors = value.unbind()
            picked = [tensors[i] for i in rows]
            some[name] = torch.nested.as_nested_tensor(picked, layout=value.layout)
        return some
    if _is_data_proto(prompts):
        some = copy.copy(prompts)
        some.batch = None if prompts.batch is None else select(prompts.batch, rows)
        some.non_tensor_batch = {k: v[list(rows)] for k, v in prompts.non_tensor_batch.items()}
        return some
    if not isinstance(prompts, Mapping):
        return [prompts[i] for i in rows]
    n = len(uids_of(prompts))
    return {k: _some(v, rows) if _values(v, n) else v for k, v in prompts.items()}


def _columns(prompts: Any) -> dict[str, Any]:
    if isinstance(prompts, TensorDictBase):
        return {str(k): prompts.get(k) for k in prompts.keys()}  # noqa: SIM118 - else rows
    if _is_data_proto(prompts):
        tensors = {} if prompts.batch is None else _columns(prompts.batch)
        return {**tensors, **prompts.non_tensor_batch}
    if isinstance(prompts, Mapping):
        return dict(prompts)
    if isinstance(prompts, list | tuple) and all(isinstance(row, Mapping) for row in prompts):
        names = dict.fromkeys(name for row in prompts for name in row)
        return {name: [row.get(name) for row in prompts] for name in names}
    return {}


def _values(column: Any, n: int | None = None) -> Sequence[Any] | None:
    """One value for each prompt (n of them, where known); None where there is one for all."""
    values: Sequence[Any] | None = None
    if isinstance(column, torch.Tensor):
        values = column.unbind() if column.dim() else None
    elif isinstance(column, np.ndarray):
        values = list(column) if column.ndim else None
    elif hasattr(column, "tensordicts"):  # NonTensorStack
        values = list(column.tolist())
    elif isinstance(column, list | tuple) and not isinstance(column, NonTensorData):
        values = column
    return values if values is not None and n in (None, len(values)) else None


def _some(column: Any, rows: Sequence[int]) -> Any:
    if isinstance(column, torch.Tensor) and column.is_nested:
        tensors = column.unbind()
        return torch.nested.as_nested_tensor([tensors[i] for i in rows], layout=column.layout)
    if isinstance(column, torch.Tensor | np.ndarray):
        return column[list(rows)]
    return type(column)(column[i] for i in rows)


def _is_data_proto(batch: Any) -> bool:
    return hasattr(batch, "non_tensor_batch") and hasattr(batch, "batch")
