"""A sound dump that the process fails to load stays, and the error says why."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blosc2
import pytest
import torch
from tensordict import TensorDict

from rlskip import SkipManager
from rlskip.errors import MissError
from rlskip.format.container import Reader
from rlskip.store import StepStore, register_codec


class Thing:
    """A value that a codec of the user's keeps."""


class Unhashable(Thing):
    __hash__ = None  # type: ignore[assignment]


class DataProto:
    """verl's, as far as dumps go."""

    def __init__(self, batch: Any, non_tensor_batch: Any, meta_info: Any) -> None:
        self.batch, self.non_tensor_batch, self.meta_info = batch, non_tensor_batch, meta_info


DataProto.__module__, DataProto.__qualname__ = "verl.protocol", "DataProto"


_ROWS = TensorDict({"ids": torch.arange(9)}, [9])
_ROLLOUTS = {"thing": {Thing(): 1}, "rows": _ROWS, "proto": DataProto(_ROWS, {}, {})}


@SkipManager.annotate(role="rollout")
def generate(prompts: list[int]) -> dict[str, Any]:
    return _ROLLOUTS


def _raise(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def _codec(decode: Callable[[Any], Any]) -> None:
    register_codec(Thing, "tests.Thing", lambda thing: {"a": 1}, decode)


@pytest.fixture(autouse=True)
def fresh(job: None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("verl.protocol")
    module.DataProto = DataProto  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verl.protocol", module)
    _codec(lambda plain: Thing())


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
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(**skip: Any) -> Any:
        names = {"experiment_name": "e", "project_name": "p"}
        config = {"dump_dir": str(tmp_path), "steps": [1], "rollout": {"enable": True}}
        SkipManager.reset()
        SkipManager.init({"skip": {**config, **names, **skip}})
        SkipManager.set_step(1)
        return generate([1])

    run()
    (meta,) = tmp_path.rglob("1/meta.json")
    with monkeypatch.context() as patch:
        _FAULTS[fault](patch)
        with pytest.raises(MissError) as caught:
            run(on_miss="error")
        is_absent = fault in ("a codec's OSError", "the memory")
        assert is_absent or "generate it once" not in caught.value.remedy
        assert run(on_miss="generate") is _ROLLOUTS
    assert StepStore(meta.parent.parent).steps() == [1]
    assert not list(tmp_path.rglob("*.bad-*"))
    _codec(lambda plain: Thing())
    assert run(on_miss="error")["rows"]["ids"].tolist() == list(range(9))
