"""The kinds of torch and of hosts: tensors, TensorDicts, verl's DataProto and PIL's images.

The parts of a node are checked here. What is made of them, the unpacker's ``make`` decides: with
torch (:mod:`rlskip.format.torch_maker`), or with numpy alone (:mod:`rlskip.format.numpy_maker`).
This module loads none of these libraries: without them there is no value of theirs to write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from rlskip.batch.columns import columns_of
from rlskip.batch.tables import loaded
from rlskip.format.codec import NODE, Kind, Maker, Node, Packer, Unpacker, pack_entries
from rlskip.format.dump_errors import UnknownTypeError

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

_DRAWN = ("transparency",)
"""What an image notes of its pixels: of its notes this alone is kept, and compared."""
_VIEW = 128
"""Bytes of a view of a row."""
_PIXELS = 8
"""The most pixels of a byte."""

# -- tensors -----------------------------------------------------------------------------


def _pack_tensor(value: torch.Tensor, packer: Packer) -> list[Node]:
    if value.is_nested:
        return _pack_nested(value, packer)
    from rlskip.format import torch_maker

    if type(value) is not loaded("torch", "Tensor"):
        raise packer.unsupported(value)
    name = str(value.dtype).removeprefix("torch.")
    if name not in torch_maker.TORCH_DTYPES or not torch_maker.is_plain(value):
        raise packer.unsupported(value, f"dtype {name}, {value.layout}, device {value.device}")
    device = None if value.device.type == "cpu" else value.device.type

    def elements() -> int | None:
        if not value.numel():
            return None
        near = torch_maker.narrowed(value)
        flat = torch_maker.flat_bytes(near)
        owned = flat.ctypes.data != value.data_ptr()
        size, kind = value.dtype.itemsize, "i" if value.dtype.is_signed else "u"
        if value.dtype.is_complex or value.dtype.is_floating_point:
            size = size // 2 if value.dtype.is_complex else size
            return packer.array(flat.view(f"u{size}"), f"x{size}", owned)
        elements = flat.view(f"{'i' if near.dtype.is_signed else 'u'}{near.element_size()}")
        return packer.array(elements, f"{kind}{size}", owned)

    return ["dense", name, list(value.shape), packer.once(value, elements), device]


def _pack_nested(value: Any, packer: Packer) -> list[Node]:
    if str(value.layout) == "torch.jagged":
        lengths = value.lengths()
        return [
            "jagged",
            packer.node(value.values(), ".values()"),
            packer.node(value.offsets(), ".offsets()"),
            None if lengths is None else packer.node(lengths, ".lengths()"),
            value._ragged_idx,
        ]
    return ["nested", packer.node(list(value.unbind()))]


def _unpack_tensor(parts: list[Node], unpacker: Unpacker) -> Any:
    form, *rest = parts
    if form == "jagged":
        values, offsets, lengths = (unpacker.node(node) for node in rest[:3])
        check_jagged(unpacker.make, values, offsets, lengths, rest[3])
        unpacker.charge(_VIEW * len(offsets))
        return unpacker.make.jagged(values, offsets, lengths, rest[3])
    if form == "nested":
        tensors = unpacker.list_of(rest[0])
        # Its parts are copied, and a file may name one tensor many times.
        unpacker.charge(sum(tensor.nbytes for tensor in tensors))
        return unpacker.make.nested(tensors)
    name, shape, number, device = rest
    if number is None:
        return unpacker.make.tensor(np.empty(0, np.uint8), name, shape, device)
    return unpacker.once(number, lambda raw: unpacker.make.tensor(raw, name, shape, device))


def check_jagged(make: Maker, values: Any, offsets: Any, lengths: Any, dim: Any) -> None:
    """Refuse what torch would trust: offsets and lengths that leave the values."""
    ends = _counts(make, offsets)
    counts = np.diff(ends)
    used = counts if lengths is None else _counts(make, lengths)
    if not (
        make.is_tensor(values)
        and type(dim) is int
        and 1 <= dim <= values.ndim
        and len(ends)
        and 0 <= ends[0] <= ends[-1] <= values.shape[dim - 1]
        and len(used) == len(counts)
        and ((used >= 0) & (used <= counts)).all()
    ):
        raise ValueError("a jagged tensor whose offsets or lengths leave its values")


def _counts(make: Maker, tensor: Any) -> np.ndarray:
    counts = make.as_array(tensor) if make.is_tensor(tensor) else None
    if counts is None or counts.ndim != 1 or counts.dtype not in (np.int32, np.int64):
        raise ValueError("offsets or lengths are not integers")
    return counts


# -- tensordict --------------------------------------------------------------------------


def _pack_tensordict(value: TensorDict, packer: Packer) -> list[Node]:
    device = None if value.device is None else value.device.type
    return [list(value.batch_size), device, None, pack_entries(columns_of(value).items(), packer)]


def _unpack_tensordict(parts: list[Node], unpacker: Unpacker) -> Any:
    batch_size, device, _, nodes = parts
    return unpacker.make.tensordict(dict(unpacker.entries(nodes)), batch_size, device)


def _pack_stack(value: Any, packer: Packer) -> list[Node]:
    parts = value.tensordicts
    if not parts:
        raise packer.unsupported(value, "it has no parts")
    wraps = type(value) is loaded("tensordict", "NonTensorStack")
    wrapper = loaded("tensordict", "NonTensorData")
    if wraps and all(type(part) is wrapper and not part.batch_size for part in parts):
        return ["data", value.stack_dim, packer.node([part.data for part in parts])]
    nodes = [packer.node(part, (i,)) for i, part in enumerate(parts)]
    return ["nontensor" if wraps else "lazy", value.stack_dim, nodes]


def _unpack_stack(parts: list[Node], unpacker: Unpacker) -> Any:
    form, dim, content = parts
    if form == "data":
        values = unpacker.list_of(content)
        unpacker.charge(NODE * len(values))
        stacked = [unpacker.make.wrapped(data, []) for data in values]
    else:
        stacked = [unpacker.node(node) for node in content]
    return unpacker.make.stack(form, stacked, dim)


def _pack_wrapped(value: Any, packer: Packer) -> list[Node]:
    return [packer.node(value.data, ".data"), list(value.batch_size)]


def _unpack_wrapped(parts: list[Node], unpacker: Unpacker) -> Any:
    data, batch_size = parts
    return unpacker.make.wrapped(unpacker.node(data), batch_size)


# -- verl --------------------------------------------------------------------------------


def _pack_dataproto(value: Any, packer: Packer) -> list[Node]:
    return [
        packer.node(value.batch, ".batch"),
        pack_entries(value.non_tensor_batch.items(), packer),
        packer.node(value.meta_info, ".meta_info"),
    ]


def _unpack_dataproto(parts: list[Node], unpacker: Unpacker) -> Any:
    batch, others, meta_info = parts
    return unpacker.make.data_proto(
        unpacker.node(batch), dict(unpacker.entries(others)), unpacker.node(meta_info)
    )


# -- PIL ---------------------------------------------------------------------------------


def _pack_image(value: Any, packer: Packer) -> list[Node]:
    palette = value.getpalette("RGBA") if value.mode in ("P", "PA") else None
    pixels = np.frombuffer(value.tobytes(), np.uint8)
    drawn = {name: value.info[name] for name in _DRAWN if name in value.info}
    return [
        value.mode,
        list(value.size),
        packer.array(pixels, "x1"),
        packer.node(palette),
        packer.node(drawn, ".info"),
    ]


def _unpack_image(parts: list[Node], unpacker: Unpacker) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise UnknownTypeError("holds images", remedy="pip install pillow") from error
    mode, (width, height), pixels, palette, info = parts
    raw = unpacker.array(pixels, "u1").tobytes()
    _check_size(width, height, len(raw))
    image = Image.frombytes(mode, (width, height), raw)
    if palette is not None:
        image.putpalette(unpacker.list_of(palette), "RGBA")
    image.info.update(unpacker.node(info))
    return image


def _check_size(width: Any, height: Any, nbytes: int) -> None:
    """Refuse an image that Pillow would allocate although its pixels are not there."""
    if not (type(width) is type(height) is int and min(width, height) >= 0):
        raise ValueError("an image without a size")
    # Lines without pixels take a pointer each.
    if width * height > _PIXELS * nbytes or max(width, height) > max(1 << 16, _PIXELS * nbytes):
        raise ValueError("an image without its pixels")


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
        lambda value, _: [list(value)],
        lambda parts, unpacker: unpacker.make.size(parts[0]),
    ),
    Kind(
        "dtype",
        _exactly("torch.dtype"),
        lambda value, _: [str(value).removeprefix("torch.")],
        lambda parts, unpacker: unpacker.make.dtype(parts[0]),
    ),
    Kind("tensordict", _exactly("tensordict.TensorDict"), _pack_tensordict, _unpack_tensordict),
    Kind(
        "tensordictstack",
        _exactly("tensordict.NonTensorStack", "tensordict.LazyStackedTensorDict"),
        _pack_stack,
        _unpack_stack,
    ),
    Kind("nontensor", _exactly("tensordict.NonTensorData"), _pack_wrapped, _unpack_wrapped),
    Kind(
        "dataproto",
        _exactly("verl.protocol.DataProto", "rlskip.batch.tables.DataProtoParts"),
        _pack_dataproto,
        _unpack_dataproto,
    ),
    Kind("image", _below("PIL.Image", "Image"), _pack_image, _unpack_image),
]
