"""What the nodes of tensors, TensorDicts, DataProtos and images mean.

The parts of a node are checked here. What is made of them, the unpacker's ``make`` decides: with
torch (:mod:`rlskip.format.torch_maker`), or with numpy alone (:mod:`rlskip.format.numpy_maker`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlskip.format.arrays import shared, size_of
from rlskip.format.codec import Maker, Node, Unpacker, add_kind
from rlskip.format.dump_errors import UnknownTypeError
from rlskip.format.plain import IN_MAPPING, places_in

_WRAPPED = 2048
"""Bytes of a tensor, of a TensorDict, and of a value that one wraps."""

NBytes = Callable[[int], int]

# -- tensors -----------------------------------------------------------------------------


def _unpack_tensor(parts: list[Node], unpacker: Unpacker) -> Any:
    form, *rest = parts
    if form == "jagged":
        values, offsets, lengths = (unpacker.node(node) for node in rest[:3])
        check_jagged(unpacker.make, values, offsets, lengths, rest[3])
        return unpacker.outside(unpacker.make.jagged, values, offsets, lengths, rest[3])
    if form == "nested":
        tensors = unpacker.list_of(rest[0])
        if not all(map(unpacker.make.is_tensor, tensors)):
            raise ValueError("a part of a nested tensor is not a tensor")
        if len({(tensor.dtype, tensor.ndim) for tensor in tensors}) > 1:
            raise ValueError("the parts of a nested tensor differ")
        return unpacker.outside(unpacker.make.nested, tensors)
    if form != "dense":
        raise ValueError(f"a tensor of the form {form!r}")
    name, shape, number, device = rest
    size = size_of(shape)
    if number is None:
        if size:
            raise ValueError("a tensor without its elements")
        return unpacker.make.tensor(np.empty(0, np.uint8), name, shape, None)
    return shared(
        unpacker,
        number,
        (name, shape),
        lambda raw: unpacker.make.tensor(raw, name, shape, device),
    )


def check_jagged(make: Maker, values: Any, offsets: Any, lengths: Any, dim: Any) -> None:
    """Refuse what torch would trust: offsets and lengths that leave the values."""
    if not all(make.is_tensor(part) for part in (values, offsets)):
        raise ValueError("values or offsets are not a tensor")
    if type(dim) is not int or not 1 <= dim <= values.ndim:
        raise ValueError("not a jagged tensor")
    ends = _counts(make, offsets)
    counts = np.diff(ends)
    if not len(ends) or ends[0] < 0 or ends[-1] > values.shape[dim - 1]:
        raise ValueError("offsets leave the values")
    if (counts < 0).any():
        raise ValueError("offsets go back")
    if lengths is not None:
        used = _counts(make, lengths)
        if len(used) != len(counts) or (used < 0).any() or (used > counts).any():
            raise ValueError("lengths leave the offsets")


def _counts(make: Maker, tensor: Any) -> np.ndarray:
    counts = make.as_array(tensor) if make.is_tensor(tensor) else None
    if counts is None or counts.ndim != 1 or counts.dtype not in (np.int32, np.int64):
        raise ValueError("offsets or lengths are not integers")
    return counts


def _cost_of_tensor(parts: list[Node], nbytes: NBytes) -> int:
    cost = _WRAPPED
    if parts[0] == "nested":  # it copies its parts, and a file may name one tensor many times
        numbers = [node[4] for node in parts[1][2]]
        cost += sum(nbytes(number) for number in numbers if number is not None)
    return cost


def _unpack_size(parts: list[Node], unpacker: Unpacker) -> Any:
    size_of(parts[0])
    return unpacker.make.size(parts[0])


add_kind("tensor", _unpack_tensor, _cost_of_tensor)
add_kind("size", _unpack_size)
add_kind("dtype", lambda parts, unpacker: unpacker.make.dtype(parts[0]))

# -- tensordict --------------------------------------------------------------------------


def _unpack_tensordict(parts: list[Node], unpacker: Unpacker) -> Any:
    batch_size, device, names, nodes = parts
    size_of(batch_size)
    entries = dict(unpacker.entries(nodes))
    for value in entries.values():
        check_entry(unpacker.make, value, batch_size)
    return unpacker.outside(unpacker.make.tensordict, entries, batch_size, device, names)


def check_entry(make: Maker, value: Any, batch_size: list[int]) -> None:
    """Refuse what an entry of a TensorDict of that size cannot be."""
    if make.is_tensor(value):
        if list(value.shape)[: len(batch_size)] != batch_size:
            raise ValueError("an entry of a TensorDict of another length")
    elif not make.is_batch(value):
        # A TensorDict would convert it to a tensor or wrap it; a file must not cause that.
        raise ValueError("an entry of a TensorDict is neither a tensor nor wrapped")


def _unpack_stack(parts: list[Node], unpacker: Unpacker) -> Any:
    form, dim, content, *name = parts
    if form == "data":
        wrap = unpacker.make.wrapped
        stacked = [unpacker.outside(wrap, data, []) for data in unpacker.list_of(content)]
    else:
        stacked = [unpacker.node(node) for node in content]
    if not stacked or not all(map(unpacker.make.is_batch, stacked)) or type(dim) is not int:
        raise ValueError("a part of a stack is not a TensorDict")
    if form not in ("data", "nontensor", "lazy"):
        raise ValueError(f"a stack of the form {form!r}")
    return unpacker.outside(unpacker.make.stack, form, stacked, dim, name[0] if name else None)


def _unpack_wrapped(parts: list[Node], unpacker: Unpacker) -> Any:
    data, batch_size = parts
    size_of(batch_size)
    return unpacker.outside(unpacker.make.wrapped, unpacker.node(data), batch_size)


def _cost_of_tensordict(parts: list[Node], nbytes: NBytes) -> int:
    return _WRAPPED + IN_MAPPING * len(parts[-1])


def _cost_of_stack(parts: list[Node], nbytes: NBytes) -> int:
    form, _, content, *_ = parts
    return _WRAPPED + (_WRAPPED * places_in(content[1:], nbytes) if form == "data" else 0)


add_kind("tensordict", _unpack_tensordict, _cost_of_tensordict)
add_kind("tensordictstack", _unpack_stack, _cost_of_stack)
add_kind("nontensor", _unpack_wrapped, _WRAPPED)

# -- verl --------------------------------------------------------------------------------


def _unpack_dataproto(parts: list[Node], unpacker: Unpacker) -> Any:
    batch, others, meta_info = parts
    if type(batch) is list and batch[0] == "tensordict":
        tensors, others = unpacker.chosen(batch[-1], others)
        batch = [*batch[:-1], tensors]
    else:
        (others,) = unpacker.chosen(others)
    return unpacker.outside(
        unpacker.make.data_proto,
        unpacker.node(batch),
        dict(unpacker.entries(others)),
        unpacker.node(meta_info),
    )


add_kind("dataproto", _unpack_dataproto)

# -- PIL ---------------------------------------------------------------------------------


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


def _cost_of_image(parts: list[Node], nbytes: NBytes) -> int:
    """Bytes that Pillow takes for an image, its pixels and a pointer to each line, and a copy."""
    mode, (width, height), pixels, *_ = parts
    if not (type(width) is type(height) is int and min(width, height) >= 0):
        raise ValueError("an image without a size")
    pixel = 1 if mode in ("1", "L", "P") else 4
    return 512 + (width * pixel + 8) * height + nbytes(pixels)


add_kind("image", _unpack_image, _cost_of_image)
