"""Bounds on what a foreign file may make: memory and time in proportion to its size."""

from __future__ import annotations

import math
from typing import Any

import attrs

from rlskip.errors import RlskipError


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
