"""Batches in processes that have no class of the host's, or no torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import attrs


@attrs.define(eq=False)
class DataProtoParts:
    """What verl's DataProto holds, for processes in which verl cannot or must not be imported."""

    batch: Any = None
    non_tensor_batch: dict[str, Any] = attrs.field(factory=dict)
    meta_info: dict[str, Any] = attrs.field(factory=dict)


class Ragged(list[Any]):
    """The rows of a nested tensor: arrays that differ in length."""


class Table(dict[str, Any]):
    """The columns of a TensorDict."""

    def __init__(self, columns: Mapping[str, Any], batch_size: Sequence[int]) -> None:
        super().__init__(columns)
        self.batch_size = tuple(batch_size)


@attrs.frozen(eq=False)
class Whole:
    """A value that belongs to a whole batch, as NonTensorData does."""

    data: Any


def loaded(module: str, name: str) -> Any:
    """A class of a module for `isinstance`; ``()`` if the module is not loaded.

    Where a module is not loaded, no value is of its classes.
    """
    return getattr(sys.modules.get(module), name, ())
