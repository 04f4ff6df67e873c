"""Tensors and arrays of every dtype in every layout: they are kept, and compared by content."""

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
# How to cut a tensor, and the same elements in a plain layout.
_CUTS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda t: t,
    "transposed": lambda t: t.T,
    "every other": lambda t: t[:, ::2],
    "a column": lambda t: t[:, 3],
    "one element of a column": lambda t: t[:1, -1],
    "one row, every third": lambda t: t[1:2, ::3],
    "one element, 2-D": lambda t: t[1:2, 2:3],
    "one element, 0-D": lambda t: t[1, 2],
    "one element of a long stride": lambda t: t[::4, 1],
    "none": lambda t: t[:, 2:2],
    "none of the rows": lambda t: t[4:],
}


def _bits(rows: int, columns: int, itemsize: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, 2, (rows, columns * itemsize), dtype=np.uint8)


def _tensor(dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(_bits(4, 6, dtype.itemsize)).view(dtype)


def _raw(value: torch.Tensor) -> np.ndarray:
    """The elements' bytes, taken one by one from the memory."""
    itemsize = value.element_size()
    memory = np.frombuffer(bytes(value.untyped_storage()), np.uint8)
    first = value.storage_offset()
    offsets = np.full(value.shape, first, np.int64)
    for axis, stride in enumerate(value.stride()):
        steps = np.arange(value.shape[axis]) * stride
        offsets += steps.reshape([-1 if a == axis else 1 for a in range(value.dim())])
    return np.array([memory[o * itemsize : (o + 1) * itemsize] for o in offsets.reshape(-1)])


@pytest.mark.parametrize("name", _DTYPES)
def test_a_tensor_of_any_dtype_and_layout_round_trips(name: str, store: StepStore) -> None:
    whole = _tensor(getattr(torch, name))
    values = {cut: take(whole) for cut, take in _CUTS.items()}
    values |= {f"expanded to {n}": whole[0].expand(n, 6) for n in (0, 1, 3)}
    store.save(1, values)
    for cut, loaded in store.load(1).items():
        value = values[cut]
        assert (loaded.dtype, loaded.shape) == (value.dtype, value.shape), cut
        assert loaded.is_contiguous(), cut
        np.testing.assert_array_equal(_raw(loaded), _raw(value), cut)
        assert fingerprint([value]) == fingerprint([loaded]), cut


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
@pytest.mark.parametrize("size", [0, 1, 5])
def test_conjugated_and_negated_views_round_trip(
    dtype: torch.dtype, size: int, store: StepStore
) -> None:
    base = torch.complex(torch.arange(5.0), torch.arange(5.0) + 1).to(dtype)[:size]
    values = {"conj": base.conj(), "imag": base.conj().imag, "real": base.conj().real}
    assert values["conj"].is_conj()
    assert values["imag"].is_neg()
    store.save(1, values)
    plain = {name: value.resolve_conj().resolve_neg().clone() for name, value in values.items()}
    for name, loaded in store.load(1).items():
        assert not loaded.is_conj()
        assert not loaded.is_neg()
        assert loaded.tolist() == plain[name].tolist()
    assert fingerprint(values) == fingerprint(plain)


@pytest.mark.parametrize(
    "dtype", ["i1", "<i8", ">i8", ">u2", "?", "<f2", ">f4", "<c16", ">c8", "<U3", ">U2", "S4",
              "<M8[s]", ">M8[ns]", ">m8[D]"],
)  # fmt: skip
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_of_any_dtype_and_layout_round_trips(
    dtype: str, order: Any, store: StepStore
) -> None:
    base = np.arange(24).reshape(4, 6)
    base = (base % 2 == 0 if dtype == "?" else base).astype(dtype, order=order)
    values = {cut: np.asarray(take(base)) for cut, take in _CUTS.items()}
    values |= {"backwards": base[::-1, ::-2], "one element, backwards": base[::-1, ::-2][:1, :1]}
    store.save(1, values)
    for cut, loaded in store.load(1).items():
        value = values[cut]
        assert (loaded.dtype.str, loaded.shape) == (value.dtype.str, value.shape), cut
        np.testing.assert_array_equal(loaded, value, cut)
        native = np.array(value.tolist(), value.dtype.newbyteorder("=")).reshape(value.shape)
        assert fingerprint([value]) == fingerprint([native]), cut
