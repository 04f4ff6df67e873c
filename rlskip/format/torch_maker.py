"""Tensors and batches of torch and tensordict, made from the parts that a dump holds, and back."""

from __future__ import annotations

import importlib
import math
import sys
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
)

from rlskip.batch.tables import DataProtoParts
from rlskip.format.dump_errors import UnknownTypeError

_VERL = "verl.protocol"
TORCH_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}


_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor has elements in memory, one after the other or strided."""
    return value.layout is torch.strided and not value.is_quantized and not value.is_meta


def flat_bytes(value: torch.Tensor) -> np.ndarray:
    """The elements in row-major order, as bytes: a view of the tensor's memory if possible."""
    plain = value.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    # torch cannot copy elements of less than a byte, but it can copy them as integers.
    plain = _fetched(plain.view(_SIGNED[plain.element_size()])).contiguous()
    # A dimension of one element may have any stride, and torch still calls it contiguous.
    return plain.as_strided((plain.numel(),), (1,)).numpy().view(np.uint8)


def _fetched(value: torch.Tensor) -> torch.Tensor:
    """The tensor in the CPU's memory.

    What comes from a GPU comes to pinned memory, which torch keeps for the next step. To memory of
    fresh pages the copy takes ten times as long, and the training thread waits for it
    (``benchmarks.gpu``).
    """
    if value.device.type != "cuda":
        return value.cpu()
    try:
        pinned = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    except RuntimeError:  # the system gives no more memory to pin
        return value.cpu()
    return pinned.copy_(value)


_NARROW = (torch.uint8, torch.int8, torch.int16, torch.int32)


def narrowed(value: torch.Tensor) -> torch.Tensor:
    """A tensor as it crosses a device's bus: its signed integers in fewer bytes, if they fit.

    A mask of int64 is an eighth of its size as bytes. The caller waits for two extremes instead.
    """
    if _is_near(value) or value.dtype not in (torch.int16, torch.int32, torch.int64):
        return value
    low, high = (int(extreme) for extreme in torch.aminmax(value.detach()))
    for dtype in _NARROW:
        bounds = torch.iinfo(dtype)
        if bounds.bits < 8 * value.element_size() and bounds.min <= low and high <= bounds.max:
            return value.detach().to(dtype)
    return value


def _is_near(value: torch.Tensor) -> bool:
    return value.device.type == "cpu"


class TorchMaker:
    """Makes tensors and batches from parts that fit together.

    `dtype` is the name that torch has for it; `shape`, `sizes` and `batch_size` are lists of sizes.

    Parameters
    ----------
    host_classes
        Whether a host's batches are rebuilt as the host's class, and not as rlskip's stand-in, and
        whether a program's own classes are wanted.
    """

    def __init__(self, host_classes: bool) -> None:
        self.host_classes = host_classes

    def dtype(self, name: str) -> torch.dtype:
        if name not in TORCH_DTYPES:
            raise UnknownTypeError(
                f"it holds torch.{name}, which torch {torch.__version__} lacks",
                remedy="load it with the torch that the run used, or a newer one",
            )
        return TORCH_DTYPES[name]

    def size(self, sizes: list[int]) -> torch.Size:
        return torch.Size(sizes)

    def tensor(
        self, raw: np.ndarray, dtype: str, shape: list[int], device: str | None
    ) -> torch.Tensor:
        """A tensor of these bytes; raises ValueError if they are not as many."""
        kind = self.dtype(dtype)
        if len(raw) != math.prod(shape) * kind.itemsize:
            raise ValueError("a tensor of another size than its elements")
        # As bytes: torch cannot copy each dtype to a GPU.
        loaded = torch.from_numpy(raw) if len(raw) else torch.empty(0, dtype=torch.uint8)
        if device == "cuda" and torch.cuda.is_available():
            loaded = loaded.cuda()
        return loaded.view(kind).reshape(shape)

    def jagged(self, values: Any, offsets: Any, lengths: Any, dim: int) -> torch.Tensor:
        """A nested tensor of rows that differ in their dimension `dim`."""
        return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, dim)

    def nested(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """A nested tensor of these, in the strided layout."""
        return torch.nested.nested_tensor(tensors, layout=torch.strided)

    def tensordict(
        self, entries: dict[str, Any], batch_size: list[int], device: str | None
    ) -> TensorDict:
        if device is not None:
            device = "cuda" if device == "cuda" and torch.cuda.is_available() else "cpu"
        made = TensorDict({}, batch_size=batch_size, device=device)
        for name, value in entries.items():
            # Without tensordict's own check of an entry, which names the whole's dimensions after
            # those of the entry, and which fails in many releases over a stack of no parts.
            value = value if device is None else value.to(device)
            made._set_str(name, value, inplace=False, validated=True)
        return made

    def stack(self, form: str, parts: list[Any], dim: int) -> Any:
        """A lazy stack of TensorDicts (`form` is ``lazy``), or a stack of wrapped values."""
        kind = LazyStackedTensorDict if form == "lazy" else NonTensorStack
        return kind(*parts, stack_dim=dim)

    def wrapped(self, data: Any, batch_size: list[int]) -> NonTensorData:
        """A value of no type of torch, as a TensorDict holds it."""
        return NonTensorData(data=data, batch_size=batch_size)

    def data_proto(self, batch: Any, others: dict[str, Any], meta_info: Any) -> Any:
        kind = _dataproto_class() if self.host_classes else DataProtoParts
        return kind(batch=batch, non_tensor_batch=others, meta_info=meta_info)

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and not value.is_nested

    def as_array(self, tensor: torch.Tensor) -> np.ndarray:
        """The elements of a tensor that is not nested."""
        return tensor.cpu().numpy()  # type: ignore[no-any-return, unused-ignore]


def _dataproto_class() -> Any:
    try:
        return (sys.modules.get(_VERL) or importlib.import_module(_VERL)).DataProto
    except ImportError as error:
        raise UnknownTypeError(
            "holds a verl DataProto, and verl cannot be imported here",
            remedy="install verl, or load it where verl is installed",
        ) from error
