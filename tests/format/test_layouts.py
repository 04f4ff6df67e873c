"""Tensors of every dtype that torch has, in every layout: they are kept, and compared by content.

Arrays of numpy, and views that torch conjugates or negates, are among the values that the other
tests draw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rlskip.store import StepStore, fingerprint

_DTYPES = sorted(
    {
        str(dtype).removeprefix("torch.")
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
    }
)
# How to cut a tensor of 4 rows and 6 columns.
_CUTS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda t: t,
    "transposed": lambda t: t.T,
    "every other": lambda t: t[:, ::2],
    "a column": lambda t: t[:, 3],
    "one element of a column": lambda t: t[:1, -1],
    "one element, 0-D": lambda t: t[1, 2],
    "one element of a long stride": lambda t: t[::4, 1],
    "none": lambda t: t[:, 2:2],
    "expanded": lambda t: t[0].expand(3, 6),
    "expanded to none": lambda t: t[0].expand(0, 6),
}


def _raw(value: torch.Tensor) -> np.ndarray:
    """The elements' bytes, taken one by one from the memory."""
    itemsize = value.element_size()
    memory = np.frombuffer(bytes(value.untyped_storage()), np.uint8)
    offsets = np.full(value.shape, value.storage_offset(), np.int64)
    for axis, stride in enumerate(value.stride()):
        steps = np.arange(value.shape[axis]) * stride
        offsets += steps.reshape([-1 if a == axis else 1 for a in range(value.dim())])
    return np.array([memory[o * itemsize : (o + 1) * itemsize] for o in offsets.reshape(-1)])


@pytest.mark.parametrize("name", _DTYPES)
def test_a_tensor_of_any_dtype_and_layout_round_trips(name: str, store: StepStore) -> None:
    dtype = getattr(torch, name)
    bits = np.random.default_rng(0).integers(0, 2, (4, 6 * dtype.itemsize), dtype=np.uint8)
    whole = torch.from_numpy(bits).view(dtype)
    values = {cut: take(whole) for cut, take in _CUTS.items()}
    store.save(1, values)
    for cut, loaded in store.load(1).items():
        value = values[cut]
        assert (loaded.dtype, loaded.shape) == (value.dtype, value.shape), cut
        assert loaded.is_contiguous(), cut
        np.testing.assert_array_equal(_raw(loaded), _raw(value), cut)
        assert fingerprint([value]) == fingerprint([loaded]), cut
