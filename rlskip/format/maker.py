"""What makes tensors and batches of the nodes of a dump."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class Maker(Protocol):
    """Makes tensors and batches from parts that fit together: of torch, or of numpy.

    `dtype` is the name that torch has for it, `shape` and `batch_size` are lists of sizes.
    `host_classes` is whether a host's or a program's own classes are wanted, too.
    """

    host_classes: bool

    def tensor(self, raw: np.ndarray, dtype: str, shape: list[int], device: str | None) -> Any:
        """A tensor of these bytes; raises ValueError if they are not as many."""

    def jagged(self, values: Any, offsets: Any, lengths: Any, dim: int) -> Any:
        """A nested tensor of rows that differ in their dimension `dim`."""

    def nested(self, tensors: list[Any]) -> Any:
        """A nested tensor of these, in the strided layout."""

    def size(self, sizes: list[int]) -> Any: ...

    def dtype(self, name: str) -> Any: ...

    def tensordict(
        self, entries: dict[str, Any], batch_size: list[int], device: str | None, names: Any
    ) -> Any: ...

    def stack(self, form: str, parts: list[Any], dim: int, name: Any) -> Any:
        """A lazy stack of TensorDicts (`form` is ``lazy``), or a stack of wrapped values."""

    def wrapped(self, data: Any, batch_size: list[int]) -> Any:
        """A value of no type of torch, as a TensorDict holds it."""

    def data_proto(self, batch: Any, others: dict[str, Any], meta_info: Any) -> Any: ...

    def for_codecs(self) -> Maker:
        """The maker of what registered codecs get."""

    def is_tensor(self, value: Any) -> bool: ...

    def is_batch(self, value: Any) -> bool:
        """Whether it is what a TensorDict holds besides: another one, a stack, a nested tensor."""

    def as_array(self, tensor: Any) -> np.ndarray:
        """The elements of a tensor that is not nested."""
