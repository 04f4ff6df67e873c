"""Tensors and batches of torch and tensordict, made from the parts that a dump holds, and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from rlskip.format.dump_errors import UnknownTypeError

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NARROW = (torch.uint8, torch.int8, torch.int16, torch.int32)


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

    From a GPU it comes to pinned memory, which torch keeps for the next step. To fresh pages the
    copy takes ten times as long, and the training thread waits for it (``benchmarks.gpu``).
    """
    if value.device.type != "cuda":
        return value.cpu()
    try:
        pinned = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    except RuntimeError:  # the system gives no more memory to pin
        return value.cpu()
    return pinned.copy_(value)


def elements(value: torch.Tensor) -> tuple[np.ndarray, str, bool]:
    """The elements as a file stores them, their spec, and whether they are a copy."""
    near = narrowed(value)
    flat, size = flat_bytes(near), value.element_size()
    owned = flat.ctypes.data != value.data_ptr()
    if value.is_complex() or value.is_floating_point():
        size //= 1 + value.is_complex()
        return flat.view(f"u{size}"), f"x{size}", owned
    kind = "i" if value.dtype.is_signed else "u"
    stored = "i" if near.dtype.is_signed else "u"
    return flat.view(f"{stored}{near.element_size()}"), f"{kind}{size}", owned


def narrowed(value: torch.Tensor) -> torch.Tensor:
    """A tensor as it crosses a device's bus: its signed integers in fewer bytes, if they fit."""
    wide = value.dtype in (torch.int16, torch.int32, torch.int64) and value.numel()
    if _is_near(value) or not wide:
        return value
    low, high = (int(extreme) for extreme in torch.aminmax(value.detach()))
    for dtype in _NARROW:
        bounds = torch.iinfo(dtype)
        if bounds.bits < 8 * value.element_size() and bounds.min <= low and high <= bounds.max:
            return value.detach().to(dtype)
    return value


def _is_near(value: torch.Tensor) -> bool:
    return value.device.type == "cpu"


# What is made, under the names of numpy_maker.
size = torch.Size
jagged = torch.nested.nested_tensor_from_jagged
wrapped = NonTensorData


def tensor(raw: np.ndarray, name: str, shape: list[int], device: str | None) -> torch.Tensor:
    kind = DTYPES.get(name)
    if kind is None:
        raise UnknownTypeError(
            f"it holds torch.{name}, which torch {torch.__version__} lacks",
            remedy="load it with the torch that the run used, or a newer one",
        )
    if len(raw) != math.prod(shape) * kind.itemsize:
        raise ValueError("a tensor of another size than its elements")
    # As bytes: torch cannot copy each dtype to a GPU.
    loaded = torch.from_numpy(raw) if len(raw) else torch.empty(0, dtype=torch.uint8)
    if device == "cuda" and torch.cuda.is_available():
        loaded = loaded.cuda()
    return loaded.view(kind).reshape(shape)


def tensordict(entries: dict[str, Any], batch_size: list[int], device: str | None) -> TensorDict:
    if device is not None:
        device = "cuda" if device == "cuda" and torch.cuda.is_available() else "cpu"
    made = TensorDict({}, batch_size=batch_size, device=device)
    for name, value in entries.items():
        # Without tensordict's own check of an entry, which names the whole's dimensions after
        # those of the entry, and which fails in many releases over a stack of no parts.
        value = value if device is None else value.to(device)
        made._set_str(name, value, inplace=False, validated=True)
    return made


def stack(form: str, parts: list[Any], dim: int) -> Any:
    """A lazy stack of TensorDicts (`form` is ``lazy``), or a stack of wrapped values."""
    return (LazyStackedTensorDict if form == "lazy" else NonTensorStack)(*parts, stack_dim=dim)
