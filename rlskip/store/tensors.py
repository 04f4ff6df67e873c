"""numpy arrays and scalars, torch tensors: dtype, shape and every bit."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import torch
from tensordict import MemoryMappedTensor

from rlskip.store.codec import Kind, Node, Packer, Unpacker, add_kind

# -- numpy -------------------------------------------------------------------------------

_NUMPY_DTYPE = re.compile(r"[<>|][biufcSUmM]\d{1,9}(\[\d{0,9}[A-Za-z]{1,2}\])?")


def _numpy_dtype(name: str) -> np.dtype:
    if not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError(name)
    return np.dtype(name)


def _flat(array: np.ndarray) -> tuple[np.ndarray, str]:
    """A contiguous 1-D view (a copy where there is none) in a type the file stores."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if array.dtype.kind in "iu" and array.dtype.isnative:
        return flat, array.dtype.kind
    if array.dtype.kind == "b":
        return flat.view(np.uint8), "u"
    width = math.gcd(array.dtype.itemsize, 8)
    if array.dtype.kind == "c":
        width = min(8, array.dtype.itemsize // 2)
    return flat.view(f"u{width}"), "x"


def _pack_ndarray(value: np.ndarray, packer: Packer) -> list[Node]:
    if value.dtype == object:
        return ["O", list(value.shape), packer.node(list(value.reshape(-1)))]
    if value.dtype.kind not in "biufcSUmM":
        raise packer.unsupported(value, f"its dtype {value.dtype} has no codec")
    if value.dtype.itemsize == 0 or value.size == 0:
        return [value.dtype.str, list(value.shape), None]
    flat, kind = _flat(value)
    owned = not np.may_share_memory(flat, value)
    number = packer.array(flat, kind, owner=value, owned=owned)
    return [value.dtype.str, list(value.shape), number]


def _unpack_ndarray(parts: list[Node], unpacker: Unpacker) -> np.ndarray:
    name, shape, content = parts
    if name == "O":
        values = unpacker.node(content)
        objects = np.empty(len(values), object)
        for i, value in enumerate(values):  # one by one: a list among them stays a list
            objects[i] = value
        return np.reshape(objects, shape)
    dtype = _numpy_dtype(name)
    if content is None:
        if dtype.itemsize and math.prod(shape):
            raise ValueError(shape)
        return np.empty(shape, dtype)
    array: np.ndarray = _shared(
        unpacker, content, lambda raw: raw.view(dtype).reshape(shape), np.ndarray
    )
    return array


def _shared(unpacker: Unpacker, number: int, build: Any, kind: type) -> Any:
    """A tensor or array that the tree names twice is one object, as it was when packed."""
    if number not in unpacker.shared:
        unpacker.shared[number] = build(unpacker.array(number, "u1"))
    found = unpacker.shared[number]
    if not isinstance(found, kind):
        raise ValueError("an array in two forms")
    return found


def _pack_scalar(value: np.generic, packer: Packer) -> list[Node]:
    if isinstance(value, np.str_):
        return ["U", str(value)]
    if isinstance(value, np.bytes_):
        return ["S", bytes(value).hex()]
    if value.dtype.kind not in "biufcmM":
        raise packer.unsupported(value, f"its dtype {value.dtype} has no codec")
    return [value.dtype.str, value.tobytes().hex()]


def _unpack_scalar(parts: list[Node], unpacker: Unpacker) -> Any:
    name, content = parts
    if name == "U":
        return np.str_(content)
    if name == "S":
        return np.bytes_(bytes.fromhex(content))
    (value,) = np.frombuffer(bytes.fromhex(content), _numpy_dtype(name))
    return value


add_kind(Kind("ndarray", _pack_ndarray, _unpack_ndarray), [np.ndarray, np.memmap])
add_kind(Kind("scalar", _pack_scalar, _unpack_scalar), test=lambda v: isinstance(v, np.generic))

# -- torch -------------------------------------------------------------------------------

_TORCH_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}
_INTEGERS = {
    torch.bool: "u1",
    torch.int8: "i1",
    torch.int16: "i2",
    torch.int32: "i4",
    torch.int64: "i8",
    torch.uint8: "u1",
    torch.uint16: "u2",
    torch.uint32: "u4",
    torch.uint64: "u8",
}


def _pack_tensor(value: torch.Tensor, packer: Packer) -> list[Node]:
    if value.is_nested:
        return _pack_nested(value, packer)
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise packer.unsupported(value, f"layout {value.layout}, device {value.device}")
    name = str(value.dtype).removeprefix("torch.")
    if name not in _TORCH_DTYPES:
        raise packer.unsupported(value, f"its dtype {value.dtype} has no codec")
    device = None if value.device.type == "cpu" else value.device.type
    number = None
    if value.numel():
        plain = value.detach().as_subclass(torch.Tensor)
        flat = plain.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        owned = flat.data_ptr() != plain.data_ptr()
        number = packer.array(*_tensor_bytes(flat), owner=value, owned=owned)
    return ["dense", name, list(value.shape), number, device]


def _tensor_bytes(flat: torch.Tensor) -> tuple[np.ndarray, str]:
    raw = flat.view(torch.uint8).numpy()
    if flat.dtype in _INTEGERS:
        code = _INTEGERS[flat.dtype]
        return raw.view(code), code[0]
    width = min(8, flat.element_size() // (2 if flat.is_complex() else 1))
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


def _unpack_tensor(parts: list[Node], unpacker: Unpacker) -> torch.Tensor:
    form, *rest = parts
    if form == "jagged":
        values, offsets, lengths = (unpacker.node(node) for node in rest[:3])
        _check_jagged(values, offsets, lengths, rest[3])
        return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, rest[3])
    if form == "nested":
        return torch.nested.nested_tensor(unpacker.node(rest[0]), layout=torch.strided)
    name, shape, number, device = rest
    dtype = _TORCH_DTYPES[name]
    if number is None:
        if math.prod(shape):
            raise ValueError(shape)
        tensor = torch.empty(shape, dtype=dtype)
    else:
        tensor = _shared(
            unpacker,
            number,
            lambda raw: _place(torch.from_numpy(raw).view(dtype).reshape(shape), device),
            torch.Tensor,
        )
    return tensor


def _place(tensor: torch.Tensor, device: str | None) -> torch.Tensor:
    """On the kind of device it came from, where this process has one."""
    if device == "cuda" and torch.cuda.is_available():
        return tensor.cuda()
    return tensor


def _check_jagged(values: Any, offsets: Any, lengths: Any, dim: Any) -> None:
    """torch trusts offsets; a file's are only trusted after this."""
    ends = offsets.tolist()
    if not (type(dim) is int and 1 <= dim <= values.dim() and offsets.dim() == 1 and ends):
        raise ValueError("no jagged tensor")
    if ends[0] < 0 or ends != sorted(ends) or ends[-1] > values.shape[dim - 1]:
        raise ValueError("offsets leave the values")
    if lengths is not None:
        counts = lengths.tolist()
        if len(counts) != len(ends) - 1 or any(
            n < 0 or a + n > b for n, a, b in zip(counts, ends, ends[1:], strict=False)
        ):
            raise ValueError("lengths leave the offsets")


add_kind(
    Kind("tensor", _pack_tensor, _unpack_tensor),
    types=[torch.Tensor, torch.nn.Parameter, MemoryMappedTensor],
    test=lambda v: isinstance(v, torch.Tensor) and v.is_nested,
)
add_kind(
    Kind("size", lambda v, _: [list(v)], lambda parts, _: torch.Size(parts[0])), types=[torch.Size]
)
add_kind(
    Kind(
        "dtype",
        lambda v, _: [str(v).removeprefix("torch.")],
        lambda parts, _: _TORCH_DTYPES[parts[0]],
    ),
    types=[torch.dtype],
)
