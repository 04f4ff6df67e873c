"""A sound dump that the process cannot load, or has no memory for, stays; the error says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import blosc2
import pytest
import torch
from tensordict import TensorDict

import rlskip
from rlskip import SkipManager
from rlskip.config.max_bytes import limits as limits_of
from rlskip.errors import ConfigError
from rlskip.format.container import Reader
from rlskip.store import AbsentDumpError, StepStore, TooLargeDumpError, register_codec
from tests.format.values import DataProto, as_verl


class Thing:
    """A value that a codec of the user's keeps."""


class Unhashable(Thing):
    __hash__ = None  # type: ignore[assignment]


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
    as_verl(monkeypatch)
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


# -- more memory than a dump may take ------------------------------------------------------------

MIB = 1 << 20


@pytest.mark.parametrize(
    "value",
    [
        lambda: torch.zeros(2 * MIB),
        lambda: [*range(MIB // 2)],
        lambda: ["a"] * (MIB // 4),
        lambda: [[{"a": [i]}] for i in range(2500)],
    ],
    ids=["arrays", "numbers", "strings", "mappings"],
)
def test_it_is_refused_by_name_and_stays(value: Callable[[], Any], tmp_path: Path) -> None:
    StepStore(tmp_path).save(1, {"large": value(), "small": torch.arange(3)})
    store = StepStore(tmp_path, max_bytes=4 * MIB)
    with pytest.raises(TooLargeDumpError, match="max_bytes") as caught:
        store.load(1)
    assert caught.value.where == str(tmp_path / "1" / "gen_batch.dp")
    assert "StepStore(directory, max_bytes=...)" in caught.value.remedy
    assert store.load(1, fields=["small"])["small"].tolist() == [0, 1, 2]
    assert store.steps() == [1]
    assert StepStore(tmp_path).load(1)["small"].tolist() == [0, 1, 2]


def test_a_variable_allows_more_to_whatever_opens_dumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "e_p" / "GBSany_Nany_inany_outany"
    StepStore(run).save(1, {"completion_ids": [[1]] * 1000})
    monkeypatch.setenv("RLSKIP_MAX_BYTES", "1000")
    with pytest.raises(TooLargeDumpError, match=r"RLSKIP_MAX_BYTES=BYTES before rlskip\.open"):
        next(rlskip.open(run)[1].iter_rows())
    monkeypatch.setenv("RLSKIP_MAX_BYTES", "9e9")
    with pytest.raises(ConfigError, match="'9e9' is not a number of bytes"):
        next(rlskip.open(run)[1].iter_rows())
    monkeypatch.setenv("RLSKIP_MAX_BYTES", str(1 << 32))
    assert next(rlskip.open(run)[1].iter_rows())["response"] == [1]


def test_a_replay_is_not_made_a_miss(
    job: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    @SkipManager.annotate(role="rollout")
    def generate(prompts: list[int]) -> torch.Tensor:
        calls.append(prompts)
        return torch.zeros(2 * MIB)

    def run(**skip: int) -> torch.Tensor:
        SkipManager.reset()
        names = {"experiment_name": "e", "project_name": "p", "rollout": {"enable": True}}
        SkipManager.init({"skip": {"dump_dir": str(tmp_path), **names, **skip}})
        SkipManager.set_step(1)
        return generate([1])

    run()
    with monkeypatch.context() as patch:
        patch.setattr("rlskip.store.step_store.half_of_memory", lambda: MIB)
        with pytest.raises(TooLargeDumpError, match=r"skip\.max_bytes"):
            run()
        assert len(run(max_bytes=64 * MIB)) == 2 * MIB
    assert len(run()) == 2 * MIB
    assert calls == [[1]]
    assert not list(tmp_path.rglob("*.bad-*"))


@pytest.mark.parametrize(
    ("groups", "limits", "least"),
    [
        ("0::/job/task\n", {"job/memory.max": "5000", "job/task/memory.max": "max\n"}, 5000),
        ("0::/job/task\n", {"job/memory.max": "5000", "job/task/memory.max": "70"}, 70),
        ("0::/../host\n", {"memory.max": "4000"}, 4000),
        ("3:cpu:/a\n2:memory:/a\n", {"memory/a/memory.limit_in_bytes": "600"}, 600),
        ("0::/job\n", {}, None),
        ("nonsense", {"memory.max": "1"}, None),
    ],
)
def test_the_limits_of_control_groups_count(
    groups: str, limits: dict[str, str], least: int | None, tmp_path: Path
) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text(groups)
    for name, text in limits.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert min(limits_of(root, own), default=None) == least
