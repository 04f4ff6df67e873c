"""The kinds of torch and of hosts: tensors, TensorDicts, verl's DataProto and PIL's images.

The parts of a node are checked here. What is made of them, the unpacker's ``make`` decides: with
torch (:mod:`rlskip.format.torch_maker`), or with numpy alone (:mod:`rlskip.format.numpy_maker`).
This module loads none of these libraries: without them there is no value of theirs to write.
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
from rlskip.format.dump_errors import UnknownTypeError

if TYPE_CHECKING:
    from tensordict import TensorDict

_DRAWN = ("transparency",)
"""What an image notes of its pixels: of its notes this alone is kept, and compared."""
_VIEW = 128
"""Bytes of a view of a row."""
_PIXELS = 8
"""The most pixels of a byte."""

# -- tensors -----------------------------------------------------------------------------


def _pack_tensor(value: Any, packer: Packer) -> list[Node]:
    if value.is_nested:
        if str(value.layout) != "torch.jagged":
            return ["nested", packer.node([*value.unbind()])]
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
        check_jagged(values, offsets, lengths, dim)
        unpacker.charge(_VIEW * len(offsets))
        return unpacker.make.jagged(values, offsets, lengths, dim)
    if form == "nested":
        tensors = unpacker.list_of(parts[0])
        # Its parts are copied, and a file may name one tensor many times.
        unpacker.charge(sum(tensor.nbytes for tensor in tensors))
        return unpacker.make.nested(tensors)
    name, shape, number, device = parts
    if number is None:
        return unpacker.make.tensor(np.empty(0, np.uint8), name, shape, device)
    return unpacker.once(number, lambda raw: unpacker.make.tensor(raw, name, shape, device))


def check_jagged(values: Any, offsets: Any, lengths: Any, dim: Any) -> None:
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


# -- tensordict --------------------------------------------------------------------------


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
        parts = [unpacker.make.wrapped(data, []) for data in values]
    else:
        parts = [*map(unpacker.node, content)]
    return unpacker.make.stack(form, parts, dim)


# -- verl --------------------------------------------------------------------------------


def _pack_dataproto(value: Any, packer: Packer) -> list[Node]:
    return [
        packer.node(value.batch, ".batch"),
        packer.entries(value.non_tensor_batch.items()),
        packer.node(value.meta_info, ".meta_info"),
    ]


def _unpack_dataproto(unpacker: Unpacker, batch: Node, others: Node, meta_info: Node) -> Any:
    kind: Any = DataProtoParts
    if unpacker.into == "host":
        try:
            kind = importlib.import_module("verl.protocol").DataProto
        except ImportError as error:
            raise UnknownTypeError(
                "holds a verl DataProto, and verl cannot be imported here",
                remedy="install verl, or load it where verl is installed",
            ) from error
    return kind(
        batch=unpacker.node(batch),
        non_tensor_batch=dict(unpacker.entries(others)),
        meta_info=unpacker.node(meta_info),
    )


# -- PIL ---------------------------------------------------------------------------------


def _pack_image(value: Any, packer: Packer) -> list[Node]:
    palette = value.getpalette("RGBA") if value.mode in ("P", "PA") else None
    pixels = packer.array(np.frombuffer(value.tobytes(), np.uint8), "x1")
    drawn = {name: value.info[name] for name in _DRAWN if name in value.info}
    nodes = packer.node(palette), packer.node(drawn, ".info")
    return [value.mode, [*value.size], pixels, *nodes]


def _unpack_image(
    unpacker: Unpacker, mode: str, size: Sequence[int], pixels: int, palette: Node, info: Node
) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise UnknownTypeError("holds images", remedy="pip install pillow") from error
    width, height = size
    raw = unpacker.source.array(pixels).tobytes()
    # Pillow would allocate an image although its pixels are not there. Lines without pixels take a
    # pointer each.
    room = _PIXELS * len(raw)
    if min(size) < 0 or width * height > room or max(size) > max(1 << 16, room):
        raise ValueError("an image without its pixels")
    image = Image.frombytes(mode, (width, height), raw)
    if palette is not None:
        image.putpalette(unpacker.list_of(palette), "RGBA")
    image.info.update(unpacker.node(info))
    return image


def _exactly(*names: str) -> Callable[[type], bool]:
    """Whether a class is one of these, given by module and name."""
    places = [(module, name) for module, _, name in (full.rpartition(".") for full in names)]
    return lambda kind: any(kind is loaded(*place) for place in places)


def _below(module: str, name: str) -> Callable[[type], bool]:
    """Whether a class is that one, or a subclass of it."""
    return lambda kind: issubclass(kind, loaded(module, name))


KINDS = [
    # Jagged tensors are of a subclass.
    Kind("tensor", _below("torch", "Tensor"), _pack_tensor, _unpack_tensor),
    Kind(
        "size",
        _exactly("torch.Size"),
        lambda value, _: [[*value]],
        lambda unpacker, sizes: unpacker.make.size(sizes),
    ),
    Kind("tensordict", _exactly("tensordict.TensorDict"), _pack_tensordict, _unpack_tensordict),
    Kind(
        "tensordictstack",
        _exactly("tensordict.NonTensorStack", "tensordict.LazyStackedTensorDict"),
        _pack_stack,
        _unpack_stack,
    ),
    Kind(
        "nontensor",
        _exactly("tensordict.NonTensorData"),
        lambda value, packer: [packer.node(value.data, ".data"), [*value.batch_size]],
        lambda unpacker, data, size: unpacker.make.wrapped(unpacker.node(data), size),
    ),
    Kind(
        "dataproto",
        _exactly("verl.protocol.DataProto", "rlskip.batch.tables.DataProtoParts"),
        _pack_dataproto,
        _unpack_dataproto,
    ),
    Kind("image", _below("PIL.Image", "Image"), _pack_image, _unpack_image),
]
