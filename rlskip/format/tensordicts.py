"""The kinds of batches: TensorDict and its relatives, verl's DataProto, PIL images."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    is_tensor_collection,
)

from rlskip.batch.columns import DataProtoParts, columns_of
from rlskip.format.codec import Kind, Node, Packer, Unpacker, add_kind, pack_entries
from rlskip.format.dump_errors import UnknownTypeError
from rlskip.format.plain import IN_MAPPING, places_in
from rlskip.format.tensors import size_of

# -- tensordict --------------------------------------------------------------------------


_WRAPPED = 2048
"""Bytes of a TensorDict, and of a value that one wraps."""


def _cost_of_tensordict(parts: list[Node], nbytes: Callable[[int], int]) -> int:
    return _WRAPPED + IN_MAPPING * len(parts[-1])


def _cost_of_stack(parts: list[Node], nbytes: Callable[[int], int]) -> int:
    form, _, content, *_ = parts
    return _WRAPPED + (_WRAPPED * places_in(content[1:], nbytes) if form == "data" else 0)


def _pack_tensordict(value: TensorDict, packer: Packer) -> list[Node]:
    device = None if value.device is None else value.device.type
    names = value.names if any(name is not None for name in value.names) else None
    entries = pack_entries(columns_of(value).items(), packer)
    return [list(value.batch_size), device, names, entries]


def _unpack_tensordict(parts: list[Node], unpacker: Unpacker) -> TensorDict:
    batch_size, device, names, nodes = parts
    size_of(batch_size)
    if device is not None:
        device = "cuda" if device == "cuda" and torch.cuda.is_available() else "cpu"
    entries = dict(unpacker.entries(nodes))
    for value in entries.values():
        check_entry(value, batch_size)
    out = unpacker.outside(TensorDict, entries, batch_size=batch_size, device=device)
    if names is not None:
        unpacker.outside(setattr, out, "names", names)
    return out


def check_entry(value: Any, batch_size: list[int]) -> None:
    """Refuse what an entry of a TensorDict of that size cannot be."""
    if isinstance(value, torch.Tensor):
        rows = [value.size(0)] if value.is_nested else list(value.shape)
        if rows[: len(batch_size)] != batch_size[: len(rows)] or len(rows) < len(batch_size) != 0:
            raise ValueError("an entry of a TensorDict of another length")
    elif not is_tensor_collection(value):
        # A TensorDict would convert it to a tensor or wrap it; a file must not cause that.
        raise ValueError("an entry of a TensorDict is neither a tensor nor wrapped")


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


def _unpack_stack(parts: list[Node], unpacker: Unpacker) -> Any:
    form, dim, content, *name = parts
    if form == "data":
        values = unpacker.list_of(content)
        stacked = [NonTensorData(data=data) for data in values]
    else:
        stacked = [unpacker.node(node) for node in content]
    if not stacked or not all(map(is_tensor_collection, stacked)) or type(dim) is not int:
        raise ValueError("a part of a stack is not a TensorDict")
    kinds = {"data": NonTensorStack, "nontensor": NonTensorStack, "lazy": LazyStackedTensorDict}
    out = unpacker.outside(kinds[form], *stacked, stack_dim=dim)
    if name:
        (out._td_dim_name,) = name
    return out


def _unpack_wrapped(parts: list[Node], unpacker: Unpacker) -> NonTensorData:
    data, batch_size = parts
    size_of(batch_size)
    return unpacker.outside(NonTensorData, data=unpacker.node(data), batch_size=batch_size)


add_kind(
    Kind("tensordict", _pack_tensordict, _unpack_tensordict, _cost_of_tensordict),
    types=[TensorDict],
)
add_kind(
    Kind("tensordictstack", _pack_stack, _unpack_stack, _cost_of_stack),
    types=[NonTensorStack, LazyStackedTensorDict],
)
add_kind(
    Kind(
        "nontensor",
        lambda v, packer: [packer.node(v.data, ".data"), list(v.batch_size)],
        _unpack_wrapped,
        cost=_WRAPPED,
    ),
    types=[NonTensorData],
)

# -- verl --------------------------------------------------------------------------------

_DATAPROTO = "verl.protocol"


def _is_verls(value: Any) -> bool:
    """Whether it is of verl's own class or of rlskip's stand-in; subclasses cannot be rebuilt."""
    kind = type(value)
    return kind is DataProtoParts or (kind.__module__, kind.__name__) == (_DATAPROTO, "DataProto")


def _pack_dataproto(value: Any, packer: Packer) -> list[Node]:
    return [
        packer.node(value.batch, ".batch"),
        pack_entries(value.non_tensor_batch.items(), packer),
        packer.node(value.meta_info, ".meta_info"),
    ]


def _unpack_dataproto(parts: list[Node], unpacker: Unpacker) -> Any:
    batch, others, meta_info = parts
    if type(batch) is list and batch[0] == "tensordict":
        tensors, others = unpacker.chosen(batch[-1], others)
        batch = [*batch[:-1], tensors]
    else:
        (others,) = unpacker.chosen(others)
    kind = unpacker.outside(_dataproto_class) if unpacker.host_classes else DataProtoParts
    return unpacker.outside(
        kind,
        batch=unpacker.node(batch),
        non_tensor_batch=dict(unpacker.entries(others)),
        meta_info=unpacker.node(meta_info),
    )


def _dataproto_class() -> Any:
    try:
        return (sys.modules.get(_DATAPROTO) or importlib.import_module(_DATAPROTO)).DataProto
    except ImportError as error:
        raise UnknownTypeError(
            "holds a verl DataProto, and verl cannot be imported here",
            remedy="install verl, or load it where verl is installed",
        ) from error


add_kind(Kind("dataproto", _pack_dataproto, _unpack_dataproto), test=_is_verls)

# -- PIL ---------------------------------------------------------------------------------


def _is_image(value: Any) -> bool:
    image = sys.modules.get("PIL.Image")
    return image is not None and isinstance(value, image.Image)


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


def _unpack_image(parts: list[Node], unpacker: Unpacker) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise UnknownTypeError("holds images", remedy="pip install pillow") from error
    mode, (width, height), pixels, palette, info = parts
    raw = unpacker.array(pixels, "u1").tobytes()
    image = unpacker.outside(Image.frombytes, mode, (width, height), raw)
    if palette is not None:
        unpacker.outside(image.putpalette, unpacker.list_of(palette), "RGBA")
    noted = unpacker.node(info)
    if type(noted) is not dict:
        raise ValueError("notes of an image that are not a mapping")
    image.info.update(noted)
    return image


def _cost_of_image(parts: list[Node], nbytes: Callable[[int], int]) -> int:
    """Bytes that Pillow takes for an image, its pixels and a pointer to each line, and a copy."""
    mode, (width, height), pixels, *_ = parts
    if not (type(width) is type(height) is int and min(width, height) >= 0):
        raise ValueError("an image without a size")
    pixel = 1 if mode in ("1", "L", "P") else 4
    return 512 + (width * pixel + 8) * height + nbytes(pixels)


add_kind(Kind("image", _pack_image, _unpack_image, _cost_of_image), test=_is_image)
