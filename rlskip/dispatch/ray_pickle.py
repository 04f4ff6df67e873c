"""Values on their way between RayPool's driver and its actors."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from ray import cloudpickle

from rlskip.dispatch.failures import DataFailure, SessionFailure, text_of


def unpack(packed: bytes, failed: str) -> Any:
    """The pickled value, or a failure if it cannot be unpickled in this process."""
    try:
        return pickle.loads(packed)
    except Exception as error:
        return DataFailure(f"{failed}: {text_of(error)}")


def sendable(result: Any) -> bytes:
    """`result`, pickled on its own, so that one that cannot be sent fails alone."""
    try:
        return pack(result)
    except Exception as error:
        what = text_of(result) if isinstance(result, SessionFailure) else text_of(error)
        sent = "" if isinstance(result, SessionFailure) else "its result cannot be sent: "
        return pack(DataFailure(f"{sent}{what}"))


class _Pickler(cloudpickle.Pickler):
    """Tensors go as numpy arrays: torch's own way through torch.save takes twenty times longer."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and _plain(value):
            return torch.from_numpy, (value.numpy(),)
        return super().reducer_override(value)


def _plain(value: torch.Tensor) -> bool:
    return (
        value.device.type == "cpu"
        and value.layout is torch.strided
        and value.dtype in _NUMPY
        and not (value.requires_grad or value.is_conj() or value.is_neg())
    )


_NUMPY = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
}


def pack(value: Any) -> bytes:
    """Pickle `value` for another process of the same run."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()
