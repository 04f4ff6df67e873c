"""Tensors on a GPU: dumped from it and replayed to it, to the bit. Needs one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict

from rlskip.format import torch_maker
from rlskip.store import StepStore
from rlskip.store.writer import Writer

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)


def _raw(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Tensors of any bits: whole, of another order in memory, every other column, none, one."""
    noise = torch.randint(0, 256, (6, 8 * dtype.itemsize), dtype=torch.uint8)
    if dtype is torch.bool:
        noise %= 2
    whole = noise.cuda().view(dtype)
    yield from (whole, whole.t(), whole[:, ::2], whole[:0], whole[0, 0])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # torch copies elements of less than a byte as integers alone.
    plain = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return plain.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("name", torch_maker.DTYPES)
def test_a_tensor_of_every_dtype_comes_back_to_the_gpu(name: str, store: StepStore) -> None:
    tensors = list(_raw(torch_maker.DTYPES[name]))
    writer = Writer(store)
    writer.save(1, tensors)
    writer.flush()
    store.save(2, tensors)
    for step in (1, 2):
        for one, other in zip(store.load(step), tensors, strict=True):
            assert (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device)
            assert torch.equal(*map(_bits, (one, other)))


def test_what_changes_after_the_call_is_not_dumped(store: StepStore) -> None:
    """A dump in the background holds what the tensors were, although they are used on."""
    writer, weights = Writer(store), torch.zeros(1 << 20, device="cuda")
    for step in range(1, 9):
        weights += 1
        writer.save(step, {"weights": weights})
    writer.flush()
    assert [store.load(step)["weights"].unique().tolist() for step in range(1, 9)] == [
        [step] for step in range(1, 9)
    ]


def test_without_memory_to_pin_a_dump_is_complete(
    store: StepStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = TensorDict({"ids": torch.arange(4096)}, batch_size=[4096]).to("cuda")
    empty = torch.empty

    def refusing(*args: object, pin_memory: bool = False, **kwargs: object) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **kwargs)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", refusing)
    store.save(1, batch)
    assert torch.equal(store.load(1)["ids"], batch["ids"])
