"""Fingerprints, pinned: dumps carry them, and another value would make all of them mismatch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rlskip.batch.tables import DataProtoParts
from rlskip.store import fingerprint
from rlskip.store.comparable import comparable

_IDS = torch.arange(12).reshape(3, 4)
_OFFSETS = torch.tensor([0, 2, 5])
_CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "é"}]
_BATCH = TensorDict({"input_ids": _IDS[:2], "nested": TensorDict({"x": _IDS[:2]}, [2])}, [2])
_BATCH["prompts"] = torch.nested.nested_tensor_from_jagged(torch.arange(5), _OFFSETS)
_BATCH.set("each", NonTensorStack("a", "b"))
_BATCH.set("all", NonTensorData(data="maths", batch_size=[2]))
_TOOL = {"name": "f", "parameters": {"x": {"type": "integer"}, 1: {2, 3}}}
_ROWS = [
    {"prompt": _CHAT, "uid": "1", "n": 8, "temperature": 1.0, "greedy": False, "tools": None},
    {"prompt": _CHAT[:1], "uid": "2"},
]
_PROTO = DataProtoParts(
    TensorDict({"input_ids": _IDS}, [3]),
    {
        "raw_prompt": np.array([_CHAT, _CHAT[:1], []], object),
        "uid": np.array(["1", "2", "3"], object),
        "index": np.array([1, 2, 3]),
    },
    {"global_steps": 7},
)

# Prompts as trainers have them.
_GOLDEN: list[tuple[str, Any]] = [
    ("e0ef101781e41d95f6443e1e8c8f9292", _IDS),
    ("e0ef101781e41d95f6443e1e8c8f9292", _IDS.numpy()),
    ("47e74152471ef71bba3c0441ad4c4136", torch.arange(12).reshape(4, 3).T),
    ("04ad570fd138db9ca1fdac8dd44a7827", torch.linspace(-1, 1, 6, dtype=torch.bfloat16)),
    ("c26dceba40ac16692f956459da67b4bc", [[1, 2, 3], [4], []]),
    ("3f3dcdfa0d0ffb9d392682f5c845d425", ["a", "b", "é", ""]),
    ("3ab44d0842fc026e338c3781d1983e2d", [_CHAT, _CHAT[:1]]),
    ("3ab44d0842fc026e338c3781d1983e2d", np.array([_CHAT, _CHAT[:1]], object)),
    ("f21da0e92b65fe1d2a3a6094cab3a011", _ROWS),
    ("151d236ce2fd037e6b611eac6112115b", _BATCH),
    ("9d71094f5f47ec5bf39ae5fa72a98ea8", _PROTO),
    ("7eb7e1e5cfc57ed26a2b35b65278142c", {"tools": [{"type": "function", "function": _TOOL}]}),
    (
        "9e84f9bd65399c7483817101f0d198b8",
        [None, True, 1, 1.5, 2**70, 1e300, float("nan"), 1j],
    ),
]


@pytest.mark.parametrize(("golden", "prompts"), _GOLDEN)
def test_ordinary_prompts_keep_their_fingerprints(golden: str, prompts: Any) -> None:
    assert fingerprint(prompts) == golden


def test_sets_of_text_are_the_same_in_every_process() -> None:
    """Computed by other processes, each of which gives the strings of a set another order."""
    a, b = frozenset("abc"), frozenset("xyz")
    value = [{a: 1, b: 2, ("t", a): 3}, {a, b, "u", "v"}, 1.5]
    assert fingerprint(value) == "3172229399d38fd85d5f4bef9e2f8dae"
    known, of_a = "<frozenset 3d496830cdfdeb4cdbb577a72cb41a71>", {"<set>": ["a", "b", "c"]}
    assert comparable({"x": value, a: a}, "x") == {
        known: of_a,
        "x": [
            {
                known: 1,
                "<frozenset 573a1fb5a31fe321ffeb610644f21727>": 2,
                "<tuple c8cf94d1d1d136cf38875f101014ffbc>": 3,
            },
            {"<set>": ["u", "v", of_a, {"<set>": ["x", "y", "z"]}]},
            1.5,
        ],
    }
