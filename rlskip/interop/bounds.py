"""Bounds on what a foreign file may make: memory and time in proportion to its size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from rlskip.batch.columns import columns_of, is_lazy, is_tensor, is_tensordict, is_wrapped
from rlskip.batch.tables import DataProtoParts, loaded
from rlskip.errors import RlskipError

_OBJECT, _PLACE, _NUMBER = 64, 16, 32
"""Bytes of an object, of a place in a container, and of a number once a list holds it."""


class ForeignDumpError(RlskipError, ValueError):
    """A file of another trainer that cannot be read, or must not be."""


@attrs.define
class Budget:
    """What a file of `size` bytes may cost: 1024 bytes for each byte, and 64 MiB."""

    size: int
    left: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.left = 1024 * self.size + (64 << 20)

    def spend(self, nbytes: int) -> None:
        self.left -= nbytes
        if self.left < 0:
            raise ForeignDumpError(
                f"its content would take more than 1024 times the file's {self.size} bytes"
            )

    def shape(self, shape: Any, itemsize: int) -> tuple[int, ...]:
        """Return `shape`, charged. An empty dimension counts as one: empty rows cost time, too."""
        if not isinstance(shape, tuple | list) or not all(type(n) is int and n >= 0 for n in shape):
            raise ForeignDumpError("a shape that is not a tuple of sizes")
        self.spend(math.prod(max(n, 1) for n in shape) * max(itemsize, 1))
        return tuple(shape)


@attrs.define
class Expansion:
    """Charges values as if each reference to an object were an object of its own.

    A file names an object again in two bytes, while lists that are made of rows, and dumps, have a
    copy for each time.
    """

    _budget: Budget
    _known: dict[int, tuple[Any, int]] = attrs.field(factory=dict)  # objects, and their sizes

    def charge(self, value: Any) -> None:
        self._budget.spend(self._size(value))

    def _size(self, value: Any) -> int:
        if isinstance(value, str | bytes | bytearray):
            return _OBJECT + len(value)
        if value is None or isinstance(value, int | float):
            return _NUMBER
        if id(value) not in self._known:
            self._known[id(value)] = value, _OBJECT + self._content(value)
        return self._known[id(value)][1]

    def _content(self, value: Any) -> int:
        if isinstance(value, np.ndarray) and value.dtype != object:
            return value.size * max(_NUMBER, value.itemsize)
        if isinstance(value, loaded("PIL.Image", "Image")):
            return 4 * math.prod(value.size)  # type: ignore[no-any-return]
        if is_tensor(value):
            parts = value.unbind() if value.is_nested else [value]
            return sum(_OBJECT + _NUMBER * part.numel() for part in parts)
        if is_wrapped(value):
            return self._size(value.data)
        if isinstance(value, DataProtoParts):
            return sum(map(self._size, (value.batch, value.non_tensor_batch, value.meta_info)))
        if is_lazy(value):
            items = value.tensordicts
        elif isinstance(value, Mapping) or is_tensordict(value):
            items = [part for item in columns_of(value).items() for part in item]
        elif isinstance(value, list | tuple | set | frozenset):
            items = list(value)
        elif isinstance(value, np.ndarray):
            items = value.reshape(-1).tolist()
        else:
            return 0
        return sum(_PLACE + self._size(item) for item in items)
