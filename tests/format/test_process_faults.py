"""A sound dump that the process fails to load stays, and the error says why."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import blosc2
import pytest
import torch
from tensordict import TensorDict

from rlskip.format.container import Reader
from rlskip.store import AbsentDumpError, StepStore, register_codec


class Thing:
    """A value that a codec of the user's keeps."""


class Unhashable(Thing):
    __hash__ = None  # type: ignore[assignment]


class DataProto:
    """verl's, as far as dumps go."""

    def __init__(self, batch: Any, non_tensor_batch: Any, meta_info: Any) -> None:
        self.batch, self.non_tensor_batch, self.meta_info = batch, non_tensor_batch, meta_info


DataProto.__module__, DataProto.__qualname__ = "verl.protocol", "DataProto"


def _raise(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def _codec(decode: Callable[[Any], Any]) -> None:
    register_codec(Thing, "tests.Thing", lambda thing: {"a": 1}, decode)


# How to make each part of a load fail: in a codec, a host's class, a device, a library.
_OUT_OF_MEMORY = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
_FAULTS: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    **{
        f"a codec's {error.__name__}": lambda patch, error=error: _codec(_raise(error("mine")))
        for error in (MemoryError, OSError, ValueError)
    },
    "a codec's unhashable value": lambda patch: _codec(lambda plain: Unhashable()),
    "a device": lambda patch: patch.setattr(torch, "from_numpy", _raise(_OUT_OF_MEMORY("CUDA"))),
    "a class of the host": lambda patch: patch.setattr(
        DataProto, "__init__", lambda self, tensors: None
    ),
    "the decompressor": lambda patch: patch.setattr(
        blosc2, "decompress2", _raise(RuntimeError("no memory"))
    ),
    "the memory": lambda patch: patch.setattr(Reader, "array", _raise(MemoryError())),
    "the stack": lambda patch: patch.setattr(torch, "from_numpy", _raise(RecursionError())),
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_a_dump_that_the_process_cannot_load_stays(
    fault: str, store: StepStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("verl.protocol")
    module.DataProto = DataProto  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verl.protocol", module)
    _codec(lambda plain: Thing())
    rows = TensorDict({"ids": torch.arange(9)}, [9])
    store.save(1, {"thing": {Thing(): 1}, "rows": rows, "proto": DataProto(rows, {}, {})})
    with monkeypatch.context() as patch:
        _FAULTS[fault](patch)
        with pytest.raises(AbsentDumpError, match="cannot"):
            store.load(1)
    assert store.steps() == [1]
    assert not list(store.directory.rglob("*.bad-*"))
    _codec(lambda plain: Thing())
    assert store.load(1)["rows"]["ids"].tolist() == list(range(9))
