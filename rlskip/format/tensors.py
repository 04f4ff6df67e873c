"""numpy arrays and scalars, torch tensors: dtype, shape and every bit."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rlskip.batch.columns import objects_of
from rlskip.format.codec import Kind, Node, Packer, Unpacker, add_kind
from rlskip.format.dump_errors import UnknownTypeError

# -- numpy -------------------------------------------------------------------------------

_NUMPY_DTYPE = re.compile(r"[<>|][biufcSUmM]\d{1,9}(\[\d{0,9}[A-Za-z]{1,2}\])?")
_LAST_CODE_POINT = 0x10FFFF


def _numpy_dtype(name: str) -> np.dtype:
    if not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError(name)
    try:
        return np.dtype(name)
    except TypeError as error:  # a long double of another platform
        raise UnknownTypeError(f"it holds an array of {name}, which this numpy lacks") from error


def size_of(shape: Any) -> int:
    """The number of elements of a shape; raises ValueError if no array can have it."""
    if type(shape) is not list or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{shape!r:.60} is not a shape")
    if math.prod(max(n, 1) for n in shape) >= 2**63:
        raise ValueError("a shape of impossible size")
    return math.prod(shape)


def _flat(array: np.ndarray) -> tuple[np.ndarray, str]:
    """A contiguous 1-D view, or a copy if there is none, in a type that the file stores."""
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
    size = size_of(shape)
    if name == "O":
        return np.reshape(objects_of(unpacker.list_of(content)), shape)
    dtype = _numpy_dtype(name)
    if content is None:
        if dtype.itemsize and size:
            raise ValueError("an array without its elements")
        # numpy makes arrays of a type without a size only as fields; elsewhere it widens the type.
        empty: np.ndarray = np.zeros(shape, [("", dtype)])["f0"]
        return empty

    def build(raw: np.ndarray) -> np.ndarray:
        return np.reshape(check_characters(raw.view(dtype)), shape)

    array: np.ndarray = _shared(unpacker, content, (name, shape), build)
    return array


def check_characters(array: np.ndarray) -> np.ndarray:
    """Return a 1-D `array`; raises if it is text with characters that there are not."""
    if array.dtype.kind == "U" and array.size:
        points = array.view(np.dtype("u4").newbyteorder(array.dtype.byteorder))
        if points.max() > _LAST_CODE_POINT:
            raise ValueError("text of impossible characters")
    return array


def _shared(unpacker: Unpacker, number: int, form: Any, build: Callable[[np.ndarray], Any]) -> Any:
    """A tensor or array that the tree names twice is one object, as it was when packed."""
    if number not in unpacker.shared:
        unpacker.shared[number] = form, build(unpacker.array(number, "u1"))
    same, found = unpacker.shared[number]
    if same != form:
        raise ValueError("one array in two forms")
    return found


def _pack_scalar(value: np.generic, packer: Packer) -> list[Node]:
    if isinstance(value, np.str_):
        return ["U", packer.node(str(value))]
    if isinstance(value, np.bytes_):
        return ["S", bytes(value).hex()]
    if value.dtype.kind not in "biufcmM":
        raise packer.unsupported(value, f"its dtype {value.dtype} has no codec")
    return [value.dtype.str, value.tobytes().hex()]


def _unpack_scalar(parts: list[Node], unpacker: Unpacker) -> Any:
    name, content = parts
    if name == "U":
        text = unpacker.node(content)
        if type(text) is not str:
            raise ValueError("text that is not a string")
        return np.str_(text)
    if name == "S":
        return np.bytes_(bytes.fromhex(content))
    (value,) = np.frombuffer(bytes.fromhex(content), _numpy_dtype(name))
    return value


add_kind(Kind("ndarray", _pack_ndarray, _unpack_ndarray), [np.ndarray])
add_kind(
    Kind("scalar", _pack_scalar, _unpack_scalar, cost=128),
    test=lambda value: isinstance(value, np.generic),
)

# -- torch -------------------------------------------------------------------------------

TORCH_DTYPES: dict[str, torch.dtype] = {
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
    if dtype in _INTEGERS:
        code = _INTEGERS[dtype]
        return raw.view(code), code[0]
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


def _unpack_tensor(parts: list[Node], unpacker: Unpacker) -> torch.Tensor:
    form, *rest = parts
    if form == "jagged":
        values, offsets, lengths = (unpacker.node(node) for node in rest[:3])
        check_jagged(values, offsets, lengths, rest[3])
        make = torch.nested.nested_tensor_from_jagged
        return unpacker.outside(make, values, offsets, lengths, rest[3])
    if form == "nested":
        tensors = unpacker.list_of(rest[0])
        if not all(isinstance(t, torch.Tensor) and not t.is_nested for t in tensors):
            raise ValueError("a part of a nested tensor is not a tensor")
        if len({(tensor.dtype, tensor.dim()) for tensor in tensors}) > 1:
            raise ValueError("the parts of a nested tensor differ")
        return unpacker.outside(torch.nested.nested_tensor, tensors, layout=torch.strided)
    if form != "dense":
        raise ValueError(f"a tensor of the form {form!r}")
    name, shape, number, device = rest
    dtype, size = _torch_dtype(name), size_of(shape)
    if number is None:
        if size:
            raise ValueError("a tensor without its elements")
        return torch.empty(shape, dtype=dtype)

    def build(raw: np.ndarray) -> torch.Tensor:
        if len(raw) != size * dtype.itemsize:
            raise ValueError("a tensor of another size than its elements")
        tensor = torch.from_numpy(raw).view(dtype).reshape(shape)
        return tensor.cuda() if device == "cuda" and torch.cuda.is_available() else tensor

    tensor: torch.Tensor = _shared(unpacker, number, (name, shape), build)
    return tensor


def _torch_dtype(name: str) -> torch.dtype:
    if name not in TORCH_DTYPES:
        raise UnknownTypeError(
            f"it holds torch.{name}, which torch {torch.__version__} lacks",
            remedy="load it with the torch that the run used, or a newer one",
        )
    return TORCH_DTYPES[name]


def check_jagged(values: Any, offsets: Any, lengths: Any, dim: Any) -> None:
    """Refuse what torch would trust: offsets and lengths that leave the values."""
    if not all(isinstance(t, torch.Tensor) for t in (values, offsets)):
        raise ValueError("values or offsets are not a tensor")
    if values.is_nested or type(dim) is not int or not 1 <= dim <= values.dim():
        raise ValueError("not a jagged tensor")
    for counts in (offsets,) if lengths is None else (offsets, lengths):
        if counts.is_nested or counts.dim() != 1 or counts.dtype not in (torch.int32, torch.int64):
            raise ValueError("offsets or lengths are not integers")
    counts = offsets.diff()
    if not len(offsets) or offsets[0] < 0 or offsets[-1] > values.shape[dim - 1]:
        raise ValueError("offsets leave the values")
    if (counts < 0).any():
        raise ValueError("offsets go back")
    if lengths is not None and (
        len(lengths) != len(counts) or (lengths < 0).any() or (lengths > counts).any()
    ):
        raise ValueError("lengths leave the offsets")


def _torch_size(sizes: Any) -> torch.Size:
    size_of(sizes)
    return torch.Size(sizes)


def _cost_of_tensor(parts: list[Node], nbytes: Callable[[int], int]) -> int:
    cost = 2048
    if parts[0] == "nested":  # it copies its parts, and a file may name one tensor many times
        numbers = [node[4] for node in parts[1][2]]
        cost += sum(nbytes(number) for number in numbers if number is not None)
    return cost


add_kind(
    Kind("tensor", _pack_tensor, _unpack_tensor, _cost_of_tensor),
    types=[torch.Tensor],
    test=lambda value: isinstance(value, torch.Tensor) and value.is_nested,
)
add_kind(
    Kind("size", lambda v, _: [list(v)], lambda parts, _: _torch_size(parts[0])), types=[torch.Size]
)
add_kind(
    Kind(
        "dtype",
        lambda v, _: [str(v).removeprefix("torch.")],
        lambda parts, _: _torch_dtype(parts[0]),
    ),
    types=[torch.dtype],
)
