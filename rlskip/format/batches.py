"""The kinds of torch and of hosts: tensors, TensorDicts, verl's DataProto and PIL's images.

The parts of a node are checked here. What is made of them, the unpacker's ``make`` decides: with
torch (:mod:`rlskip.format.torch_maker`), or with numpy alone (:mod:`rlskip.format.numpy_maker`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from rlskip.batch.columns import columns_of
from rlskip.batch.tables import DataProtoParts, loaded
from rlskip.format.codec import NODE, Kind, Node, Packer, Unpacker

if TYPE_CHECKING:
    from tensordict import TensorDict

_VIEW = 128  # bytes of a view of a row
_PIXEL = 8  # bytes of a pixel, or of the pointer to a line of them, at most


def _pack_tensor(value: Any, packer: Packer) -> list[Node]:
    if value.is_nested:
        if str(value.layout) != "torch.jagged":
            raise packer.unsupported(value, "nested in strided layout, not torch.jagged")
        parts = {"values": value.values(), "offsets": value.offsets(), "lengths": value.lengths()}
        nodes = [packer.node(part, f".{name}()") for name, part in parts.items()]
        return ["jagged", *nodes, value._ragged_idx]
    from rlskip.format import torch_maker

    if type(value) is not loaded("torch", "Tensor"):
        raise packer.unsupported(value)
    name = str(value.dtype).removeprefix("torch.")
    if name not in torch_maker.DTYPES or not torch_maker.is_plain(value):
        raise packer.unsupported(value, f"dtype {name}, {value.layout}, device {value.device}")
    device = None if value.device.type == "cpu" else value.device.type
    return ["dense", name, [*value.shape], packer.once(value, torch_maker.elements), device]


def _unpack_tensor(unpacker: Unpacker, form: str, *parts: Node) -> Any:
    if form == "jagged":
        (values, offsets, lengths), dim = map(unpacker.node, parts[:3]), parts[3]
        _check_jagged(values, offsets, lengths, dim)
        unpacker.charge(_VIEW * len(offsets))
        return unpacker.make.jagged(values, offsets, lengths, dim)
    name, shape, number, device = parts
    return unpacker.once(number, lambda raw: unpacker.make.tensor(raw, name, shape, device))


def _check_jagged(values: Any, offsets: Any, lengths: Any, dim: Any) -> None:
    """Refuse what torch would trust: offsets and lengths that leave the values."""
    ends = _counts(offsets)
    room = [end - start for start, end in pairwise(ends)]
    used = room if lengths is None else _counts(lengths)
    if not (
        type(dim) is int
        and 1 <= dim <= values.ndim
        and ends[0] >= 0
        and ends[-1] <= values.shape[dim - 1]
        and len(used) == len(room)
        and all(0 <= length <= most for length, most in zip(used, room, strict=True))
    ):
        raise ValueError("a jagged tensor whose offsets or lengths leave its values")


def _counts(tensor: Any) -> list[int]:
    if str(tensor.dtype).removeprefix("torch.") not in ("int32", "int64") or tensor.ndim != 1:
        raise ValueError("offsets or lengths are not integers")
    return tensor.tolist()  # type: ignore[no-any-return]


def _pack_tensordict(value: TensorDict, packer: Packer) -> list[Node]:
    device = None if value.device is None else value.device.type
    return [[*value.batch_size], device, None, packer.entries(columns_of(value).items())]


def _unpack_tensordict(unpacker: Unpacker, size: list[int], device: Node, _: Node, of: Node) -> Any:
    return unpacker.make.tensordict(dict(unpacker.entries(of)), size, device)


def _pack_stack(value: Any, packer: Packer) -> list[Node]:
    parts = value.tensordicts
    if not parts:
        raise packer.unsupported(value, "it has no parts")
    wraps = type(value) is loaded("tensordict", "NonTensorStack")
    wrapper = loaded("tensordict", "NonTensorData")
    if wraps and all(type(part) is wrapper and not part.batch_size for part in parts):
        return ["data", value.stack_dim, packer.node([part.data for part in parts])]
    form = "nontensor" if wraps else "lazy"
    return [form, value.stack_dim, [packer.node(part, (i,)) for i, part in enumerate(parts)]]


def _unpack_stack(unpacker: Unpacker, form: str, dim: int, content: Node) -> Any:
    if form == "data":
        values = unpacker.list_of(content)
        unpacker.charge(NODE * len(values))
        parts = [unpacker.make.wrapped(data, batch_size=[]) for data in values]
    else:
        parts = [*map(unpacker.node, content)]
    return unpacker.make.stack(form, parts, dim)


def _pack_dataproto(value: Any, packer: Packer) -> list[Node]:
    return [
        packer.node(value.batch, ".batch"),
        packer.entries(value.non_tensor_batch.items()),
        packer.node(value.meta_info, ".meta_info"),
    ]


def _unpack_dataproto(unpacker: Unpacker, batch: Node, others: Node, meta_info: Node) -> Any:
    kind: Any = DataProtoParts
    if unpacker.into == "host":
        kind = importlib.import_module("verl.protocol").DataProto
    return kind(
        batch=unpacker.node(batch),
        non_tensor_batch=dict(unpacker.entries(others)),
        meta_info=unpacker.node(meta_info),
    )


def _pack_image(value: Any, packer: Packer) -> list[Node]:
    palette = value.getpalette("RGBA") if value.mode in ("P", "PA") else None
    pixels = packer.array(np.frombuffer(value.tobytes(), np.uint8), "x1")
    # Of an image's notes this alone is kept, and compared.
    drawn = {name: note for name, note in value.info.items() if name == "transparency"}
    nodes = packer.node(palette), packer.node(drawn, ".info")
    return [value.mode, [*value.size], pixels, *nodes]


def _unpack_image(
    unpacker: Unpacker, mode: str, size: Sequence[int], pixels: int, palette: Node, info: Node
) -> Any:
    from PIL import Image

    width, height = size
    raw = unpacker.source.array(pixels).tobytes()
    # Pillow would allocate an image although its pixels are not there.
    unpacker.charge(_PIXEL * max(width, 1) * max(height, 1))
    image = Image.frombytes(mode, (width, height), raw)
    if palette is not None:
        image.putpalette(unpacker.list_of(palette), "RGBA")
    image.info.update(unpacker.node(info))
    return image


def _exactly(module: str, *names: str) -> Callable[[type], bool]:
    """Whether a class is one of these of a module."""
    return lambda kind: any(kind is loaded(module, name) for name in names)


def _below(module: str, name: str) -> Callable[[type], bool]:
    """Whether a class is that one, or a subclass of it."""
    return lambda kind: issubclass(kind, loaded(module, name))


KINDS = [
    # Jagged tensors are of a subclass.
    Kind("tensor", _below("torch", "Tensor"), _pack_tensor, _unpack_tensor),
    Kind(
        "size",
        _exactly("torch", "Size"),
        lambda value, _: [[*value]],
        lambda unpacker, sizes: unpacker.make.size(sizes),
    ),
    Kind("tensordict", _exactly("tensordict", "TensorDict"), _pack_tensordict, _unpack_tensordict),
    Kind(
        "tensordictstack",
        _exactly("tensordict", "NonTensorStack", "LazyStackedTensorDict"),
        _pack_stack,
        _unpack_stack,
    ),
    Kind(
        "nontensor",
        _exactly("tensordict", "NonTensorData"),
        lambda value, packer: [packer.node(value.data, ".data"), [*value.batch_size]],
        lambda unpacker, data, size: unpacker.make.wrapped(unpacker.node(data), batch_size=size),
    ),
    Kind(
        "dataproto",
        lambda kind: kind in (DataProtoParts, loaded("verl.protocol", "DataProto")),
        _pack_dataproto,
        _unpack_dataproto,
    ),
    Kind("image", _below("PIL.Image", "Image"), _pack_image, _unpack_image),
]
