"""Tensors as nodes: dtype, shape and every bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlskip.format.codec import Node, Packer, add_packer
from rlskip.format.torch_maker import TORCH_DTYPES

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _pack_tensor(value: torch.Tensor, packer: Packer) -> list[Node]:
    if value.is_nested:
        return _pack_nested(value, packer)
    name = str(value.dtype).removeprefix("torch.")
    if name not in TORCH_DTYPES or not is_plain(value):
        raise packer.unsupported(value, f"dtype {name}, {value.layout}, device {value.device}")
    device = None if value.device.type == "cpu" else value.device.type
    number = None
    if value.numel():
        flat = flat_bytes(value)
        owned = flat.ctypes.data != value.data_ptr()
        number = packer.array(*_stored(flat, value.dtype), owner=value, owned=owned)
    return ["dense", name, list(value.shape), number, device]


def is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor has elements in memory, one after the other or strided."""
    return value.layout is torch.strided and not value.is_quantized and not value.is_meta


def flat_bytes(value: torch.Tensor) -> np.ndarray:
    """The elements in row-major order, as bytes: a view of the tensor's memory if possible."""
    plain = value.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().cpu()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    # torch cannot copy elements of less than a byte, but it can copy them as integers.
    plain = plain.view(_SIGNED[plain.element_size()]).contiguous()
    # A dimension of one element may have any stride, and torch still calls it contiguous.
    return plain.as_strided((plain.numel(),), (1,)).numpy().view(np.uint8)


def _stored(raw: np.ndarray, dtype: torch.dtype) -> tuple[np.ndarray, str]:
    """Bytes of a tensor as the elements that the file stores, and their kind."""
    if not dtype.is_floating_point and not dtype.is_complex:
        kind = "i" if dtype.is_signed else "u"
        return raw.view(f"{kind}{dtype.itemsize}"), kind
    width = dtype.itemsize // (2 if dtype.is_complex else 1)
    return raw.view(f"u{width}"), "x"


def _pack_nested(value: Any, packer: Packer) -> list[Node]:
    if value.layout is torch.jagged:
        lengths = value.lengths()
        return [
            "jagged",
            packer.node(value.values(), ".values()"),
            packer.node(value.offsets(), ".offsets()"),
            None if lengths is None else packer.node(lengths, ".lengths()"),
            value._ragged_idx,
        ]
    return ["nested", packer.node(list(value.unbind()))]


add_packer(
    "tensor",
    _pack_tensor,
    types=[torch.Tensor],
    test=lambda value: isinstance(value, torch.Tensor) and value.is_nested,
)
add_packer("size", lambda value, _: [list(value)], [torch.Size])
add_packer("dtype", lambda value, _: [str(value).removeprefix("torch.")], [torch.dtype])
