"""The kinds of numpy: arrays and scalars, with dtype, shape and every bit."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from rlskip.batch.columns import objects_of
from rlskip.format.codec import Kind, Node, Packer, Unpacker
from rlskip.format.dump_errors import UnknownTypeError

_NUMPY_DTYPE = re.compile(r"[<>|][biufcSUmM]\d{1,9}(\[\d{0,9}[A-Za-z]{1,2}\])?")
_LAST_CODE_POINT = 0x10FFFF


def _numpy_dtype(name: str) -> np.dtype:
    if not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError(name)
    try:
        return np.dtype(name)
    except TypeError as error:  # a long double of another platform
        raise UnknownTypeError(f"it holds an array of {name}, which this numpy lacks") from error


def _flat(array: np.ndarray) -> tuple[np.ndarray, str]:
    """A contiguous 1-D view, or a copy if there is none, in a type that the file stores."""
    flat, kind = np.ascontiguousarray(array).reshape(-1), array.dtype.kind
    if kind in "iu" and array.dtype.isnative:
        return flat, f"{kind}{flat.itemsize}"
    if kind == "b":
        return flat.view(np.uint8), "u1"
    width = math.gcd(array.dtype.itemsize, 8)
    if kind == "c":
        width = min(8, array.dtype.itemsize // 2)
    return flat.view(f"u{width}"), f"x{width}"


def _pack_ndarray(value: np.ndarray, packer: Packer) -> list[Node]:
    if value.dtype == object:
        return ["O", list(value.shape), packer.node(list(value.reshape(-1)))]
    if value.dtype.kind not in "biufcSUmM" or not value.dtype.itemsize:
        raise packer.unsupported(value, f"its dtype {value.dtype} has no codec")

    def elements() -> int | None:
        if value.size == 0:
            return None
        flat, spec = _flat(value)
        return packer.array(flat, spec, owned=not np.may_share_memory(flat, value))

    return [value.dtype.str, list(value.shape), packer.once(value, elements)]


def _unpack_ndarray(parts: list[Node], unpacker: Unpacker) -> np.ndarray:
    name, shape, content = parts
    if name == "O":
        return np.reshape(objects_of(unpacker.list_of(content)), shape)
    dtype = _numpy_dtype(name)
    if content is None:
        return np.reshape(np.empty(0, dtype), shape)

    def build(raw: np.ndarray) -> np.ndarray:
        array = raw.view(dtype)
        if dtype.kind == "U":
            points = array.view(np.dtype("u4").newbyteorder(dtype.byteorder))
            if points.max() > _LAST_CODE_POINT:  # Python would make a string of it
                raise ValueError("text of impossible characters")
        return np.reshape(array, shape)

    return unpacker.once(content, build)


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
        return np.str_(unpacker.node(content))
    if name == "S":
        return np.bytes_(bytes.fromhex(content))
    (value,) = np.frombuffer(bytes.fromhex(content), _numpy_dtype(name))
    return value


KINDS = [
    Kind("ndarray", np.ndarray, _pack_ndarray, _unpack_ndarray),
    Kind("scalar", lambda kind: issubclass(kind, np.generic), _pack_scalar, _unpack_scalar),
]
