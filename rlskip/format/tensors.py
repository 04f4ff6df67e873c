"""Tensors, TensorDicts, verl's DataProto and PIL images as nodes: what is written of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from rlskip.batch.columns import columns_of
from rlskip.batch.tables import DataProtoParts, loaded
from rlskip.format.codec import Node, Packer, add_packer, pack_entries
from rlskip.format.torch_maker import TORCH_DTYPES, VERL

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

# -- tensordict --------------------------------------------------------------------------


def _pack_tensordict(value: TensorDict, packer: Packer) -> list[Node]:
    device = None if value.device is None else value.device.type
    names = value.names if any(name is not None for name in value.names) else None
    entries = pack_entries(columns_of(value).items(), packer)
    return [list(value.batch_size), device, names, entries]


def _pack_stack(value: Any, packer: Packer) -> list[Node]:
    parts = value.tensordicts
    dim_name = getattr(value, "_td_dim_name", None)
    name = [] if dim_name is None else [dim_name]
    if type(value) is NonTensorStack and all(
        type(p) is NonTensorData and not p.batch_size for p in parts
    ):
        return ["data", value.stack_dim, packer.node([p.data for p in parts]), *name]
    form = "nontensor" if type(value) is NonTensorStack else "lazy"
    nodes = [packer.node(part, (i,)) for i, part in enumerate(parts)]
    return [form, value.stack_dim, nodes, *name]


add_packer("tensordict", _pack_tensordict, [TensorDict])
add_packer("tensordictstack", _pack_stack, [NonTensorStack, LazyStackedTensorDict])
add_packer(
    "nontensor",
    lambda value, packer: [packer.node(value.data, ".data"), list(value.batch_size)],
    [NonTensorData],
)

# -- verl --------------------------------------------------------------------------------


def _is_verls(value: Any) -> bool:
    """Whether it is of verl's own class or of rlskip's stand-in; subclasses cannot be rebuilt."""
    kind = type(value)
    return kind is DataProtoParts or (kind.__module__, kind.__name__) == (VERL, "DataProto")


def _pack_dataproto(value: Any, packer: Packer) -> list[Node]:
    return [
        packer.node(value.batch, ".batch"),
        pack_entries(value.non_tensor_batch.items(), packer),
        packer.node(value.meta_info, ".meta_info"),
    ]


add_packer("dataproto", _pack_dataproto, test=_is_verls)

# -- PIL ---------------------------------------------------------------------------------


def _pack_image(value: Any, packer: Packer) -> list[Node]:
    palette = value.getpalette("RGBA") if value.mode in ("P", "PA") else None
    pixels = np.frombuffer(value.tobytes(), np.uint8)
    return [
        value.mode,
        list(value.size),
        packer.array(pixels, "x"),
        packer.node(palette),
        packer.node(dict(value.info), ".info"),
    ]


add_packer("image", _pack_image, test=lambda value: isinstance(value, loaded("PIL.Image", "Image")))
