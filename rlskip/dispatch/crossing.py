"""Values on their way between a driver and its actors."""

from __future__ import annotations

import contextlib
import io
import pickle
from typing import Any

import torch
from ray import cloudpickle

from rlskip.dispatch.failures import DataFailure, text_of


class _Pickler(cloudpickle.Pickler):
    """Tensors go as numpy arrays: torch's own way through torch.save takes twenty times longer."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor:
            with contextlib.suppress(TypeError, RuntimeError):  # numpy has not all kinds of tensors
                return torch.from_numpy, (value.numpy(),)
        return super().reducer_override(value)


def pack(value: Any) -> bytes:
    """Pickle `value` for another process of the same run."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


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
        return pack(DataFailure(f"its result cannot be sent: {text_of(error)}"))
