"""Batches of the field: TensorDict and its kin, verl's DataProto, PIL images."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import attrs
import numpy as np
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
)

from rlskip.store.codec import Kind, Node, Packer, Unpacker, add_kind
from rlskip.store.errors import UnknownTypeError
from rlskip.store.plain import pack_entries

# -- tensordict --------------------------------------------------------------------------


def _pack_tensordict(value: TensorDict, packer: Packer) -> list[Node]:
    device = None if value.device is None else value.device.type
    names = value.names if any(name is not None for name in value.names) else None
    items = ((key, value._get_str(key, None)) for key in list(value.keys()))
    return [list(value.batch_size), device, names, pack_entries(items, packer)]


def _unpack_tensordict(parts: list[Node], unpacker: Unpacker) -> TensorDict:
    batch_size, device, names, entries = parts
    if device not in (None, "cpu"):
        import torch

        device = device if device == "cuda" and torch.cuda.is_available() else "cpu"
    out = TensorDict(dict(unpacker.entries(entries)), batch_size=batch_size, device=device)
    if names is not None:
        out.names = names
    return out


def _pack_stack(value: Any, packer: Packer) -> list[Node]:
    parts = value.tensordicts
    if type(value) is NonTensorStack and all(
        type(p) is NonTensorData and not p.batch_size for p in parts
    ):
        return ["data", value.stack_dim, packer.node([p.data for p in parts])]
    form = "nontensor" if type(value) is NonTensorStack else "lazy"
    nodes = [packer.node(part, (i,)) for i, part in enumerate(parts)]
    return [form, value.stack_dim, nodes]


def _unpack_stack(parts: list[Node], unpacker: Unpacker) -> Any:
    form, dim, content = parts
    if form == "data":
        return NonTensorStack(
            *(NonTensorData(data=data) for data in unpacker.node(content)), stack_dim=dim
        )
    kind = {"nontensor": NonTensorStack, "lazy": LazyStackedTensorDict}[form]
    return kind(*(unpacker.node(node) for node in content), stack_dim=dim)


add_kind(Kind("tensordict", _pack_tensordict, _unpack_tensordict), types=[TensorDict])
add_kind(
    Kind("tensordictstack", _pack_stack, _unpack_stack),
    types=[NonTensorStack, LazyStackedTensorDict],
)
add_kind(
    Kind(
        "nontensor",
        lambda v, packer: [packer.node(v.data, ".data"), list(v.batch_size)],
        lambda parts, unpacker: NonTensorData(data=unpacker.node(parts[0]), batch_size=parts[1]),
    ),
    types=[NonTensorData],
)
# -- verl --------------------------------------------------------------------------------

_DATAPROTO = "verl.protocol"


@attrs.define(eq=False)
class DataProtoParts:
    """What a DataProto holds, where verl is not there or not wanted; kept as one."""

    batch: Any = None
    non_tensor_batch: dict[str, Any] = attrs.field(factory=dict)
    meta_info: dict[str, Any] = attrs.field(factory=dict)


def _is_dataproto(value: Any) -> bool:
    kind = type(value)
    return kind is DataProtoParts or (
        kind.__name__ == "DataProto" and kind.__module__ == _DATAPROTO
    )


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
    kind = _dataproto_class() if unpacker.host_classes else DataProtoParts
    return kind(
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


add_kind(Kind("dataproto", _pack_dataproto, _unpack_dataproto), test=_is_dataproto)

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
    mode, size, pixels, palette, info = parts
    raw = unpacker.array(pixels, "u1").tobytes()
    width, height = size
    if width * height > 8 * max(1, len(raw)):
        raise ValueError(size)
    image = Image.frombytes(mode, (width, height), raw)
    if palette is not None:
        image.putpalette(unpacker.node(palette), "RGBA")
    image.info.update(unpacker.node(info))
    return image


add_kind(Kind("image", _pack_image, _unpack_image), test=_is_image)
