"""The format, pinned: dumps that were written once, and dumps of other versions."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rlskip.store import DumpMeta, Identity, OtherFormatError, StepStore
from tests.format.values import same

_GOLDEN = Path(__file__).parent / "golden"

LATER = "0123456789abcdef-1"
MADE = {"prompts": "0123", "n": 2, "prompt_len": 4, "response_len": 8, "sampling.temperature": 1.0}


def _as_version(store: StepStore, version: int) -> None:
    meta = store.directory / "1" / "meta.json"
    said = DumpMeta.from_bytes(meta.read_bytes(), "")
    meta.write_bytes(attrs.evolve(said, version=version).to_bytes())
    dump = store.directory / "1" / "gen_batch.dp"
    data = bytearray(dump.read_bytes())
    data[8] = version
    dump.write_bytes(data)


@pytest.mark.parametrize("version", [1, 2, 3, 5])
@pytest.mark.parametrize("look", [StepStore.read_meta, StepStore.load, StepStore.nearest])
def test_another_version_is_refused_by_name(look: Any, version: int, store: StepStore) -> None:
    store.save(1, "x")
    _as_version(store, version)
    with pytest.raises(OtherFormatError) as caught:
        look(store, 1)
    assert f"format {version}; this rlskip reads format 4" in caught.value.what
    assert (store.directory / "1").exists(), "it is sound: it stays"


def test_the_golden_dump_loads(tmp_path: Path) -> None:
    """What was written once in this version must be read exactly."""
    shutil.copytree(_GOLDEN / "v4", tmp_path / "run")
    store = StepStore(tmp_path / "run")
    assert (store.steps(), store.in_order(3)) == ([3], ["", LATER])
    meta = store.read_meta(3)
    assert meta is not None
    assert meta.identity == Identity.of(MADE)
    assert meta.info == {"seconds": 2.5}
    assert store.load(3, call=LATER) == {"call": 1}
    assert same(store.load(3), golden_rollouts())
    assert same(store.load(3, part="aside"), {"rng": torch.arange(16, dtype=torch.uint8)})


def golden_rollouts() -> dict[str, Any]:
    """Every kind of value; ``PYTHONPATH=. python tests/format/test_golden.py`` wrote the dump."""
    offsets = torch.tensor([0, 2, 5])
    batch = TensorDict(
        {
            "ids": torch.tensor([[1, 2, 300], [70_000, -5, 2**40]]),
            "mask": torch.tensor([[True, False], [False, True]]),
            "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
            "jagged": torch.nested.nested_tensor_from_jagged(torch.arange(5), offsets),
        },
        [2],
    )
    batch.set("task", NonTensorData(data="maths", batch_size=[2]))
    batch.set("each", NonTensorStack("a", "b"))
    objects = np.empty(2, object)
    objects[:] = [None, {"turns": (1, 2.5)}]
    return {
        "batch": batch,
        "long": torch.arange(300_000),
        "zeros": torch.zeros(1000, 3),
        "empty": torch.empty(0, 7, dtype=torch.int32),
        "numpy": np.linspace(0, 1, 5),
        "names": np.array(["one", "zwei"]),
        "objects": objects,
        "runs": [[1, 2, 3], [], [4, 5, 6, 7, 8, 9]],
        "strings": ["a", "é", "\ud800", "d", "e", "f", "g", "h"],
        "scalars": [None, True, -1, 2**100, 0.1, float("inf"), b"\x00", np.float32(1.5)],
        "kinds": [(1,), {2}, frozenset([3]), torch.Size([4]), bytearray(b"5")],
        7: {"nested": {None: []}},
    }


if __name__ == "__main__":
    golden = StepStore(_GOLDEN / "v4")
    golden.save(
        3,
        golden_rollouts(),
        identity=Identity.of(MADE),
        info={"seconds": 2.5},
        sidecar={"rng": torch.arange(16, dtype=torch.uint8)},
    )
    golden.save(3, {"call": 1}, call=LATER, info={"place": 1})
