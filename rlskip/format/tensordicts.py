"""TensorDict and its relatives, verl's DataProto and PIL images as nodes."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from rlskip.batch.columns import columns_of
from rlskip.batch.tables import DataProtoParts
from rlskip.format.codec import Node, Packer, add_packer, pack_entries
from rlskip.format.torch_maker import VERL


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


add_packer("image", _pack_image, test=_is_image)
