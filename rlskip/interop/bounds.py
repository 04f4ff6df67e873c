"""Bounds on what a foreign file may make: memory and time in proportion to its size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
)

from rlskip.errors import RlskipError

BATCHES = (TensorDictBase, NonTensorData, NonTensorStack)


class ForeignDumpError(RlskipError, ValueError):
    """A file of another trainer that cannot be read, or must not be."""


@attrs.define
class Budget:
    """What a file of `size` bytes may cost: 1024 bytes for each byte, and 64 MiB.

    ``parsed`` counts the bytes of the pickles within the file's own: it may contain each once.
    """

    size: int
    left: int = attrs.field(init=False)
    parsed: int = 0

    def __attrs_post_init__(self) -> None:
        self.left = 1024 * self.size + (64 << 20)

    def spend(self, nbytes: int) -> None:
        self.left -= nbytes
        if self.left < 0:
            raise ForeignDumpError(
                f"its content would take more than 1024 times the file's {self.size} bytes"
            )

    def parse(self, nbytes: int) -> None:
        self.parsed += nbytes
        if self.parsed > 4 * self.size:
            raise ForeignDumpError("it contains the same pickle over and over")


def check_shape(shape: Any, budget: Budget, itemsize: int) -> tuple[int, ...]:
    """Return `shape`, charged. An empty dimension counts as one: empty rows cost time, too."""
    if not isinstance(shape, tuple | list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ForeignDumpError("a shape that is not a tuple of sizes")
    budget.spend(math.prod(max(n, 1) for n in shape) * max(itemsize, 1))
    return tuple(shape)


def check_value(value: Any, budget: Budget) -> None:
    """Refuse what a reader could not walk: a value that contains itself, or parts of false sizes.

    A part that occurs several times is charged each time, as a copy of it costs.
    """
    _weigh(value, budget, {})


def _weigh(value: Any, budget: Budget, weights: dict[int, int]) -> int:
    """`weights` has 0 for a value whose parts are being weighed."""
    if id(value) in weights:
        known = weights[id(value)]
        if not known:
            raise ForeignDumpError("a value that contains itself")
        budget.spend(known)
        return known
    weights[id(value)] = 0
    weight = 1 + _own_weight(value)
    budget.spend(weight)
    weight += sum(_weigh(part, budget, weights) for part in _parts(value))
    weights[id(value)] = weight
    return weight


def _own_weight(value: Any) -> int:
    if isinstance(value, range):
        return len(value)
    if isinstance(value, torch.Tensor):
        parts = value.unbind() if value.is_nested else [value]
        return sum(part.numel() * part.element_size() for part in parts)
    if isinstance(value, BATCHES):
        size = value.batch_size
        return math.prod(max(n, 1) for n in size)
    return 0


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, NonTensorData):
        return [value.data]
    if isinstance(value, LazyStackedTensorDict | NonTensorStack):
        return list(value.tensordicts)
    if isinstance(value, TensorDict):
        parts = [value._get_str(key, None) for key in list(value.keys())]
        for part in parts:
            rows = (part.size(0),) if getattr(part, "is_nested", False) else tuple(part.shape)
            if rows[: len(value.batch_size)] != tuple(value.batch_size)[: len(rows)]:
                raise ForeignDumpError("a TensorDict with a field of another length")
        return parts
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, np.ndarray) and value.dtype == object:
        return list(value.reshape(-1))
    return ()
