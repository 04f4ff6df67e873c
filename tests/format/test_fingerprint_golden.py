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
    ("40631994a30d035b5721e716cd5af662", _IDS),
    ("40631994a30d035b5721e716cd5af662", _IDS.numpy()),
    ("9d31dd768121a5d5d67dcd92cf61b239", torch.arange(12).reshape(4, 3).T),
    ("8414cc96b3b190d0127bc6b2feeeda19", torch.linspace(-1, 1, 6, dtype=torch.bfloat16)),
    ("ce60634b14275b83269c370194e63e55", [[1, 2, 3], [4], []]),
    ("9f9e2bff050e87d7a8d2be240b4031e6", ["a", "b", "é", ""]),
    ("b8f1a3cc81c87698131e07216e42511f", [_CHAT, _CHAT[:1]]),
    ("b8f1a3cc81c87698131e07216e42511f", np.array([_CHAT, _CHAT[:1]], object)),
    ("8ba74efe64cd9b59ae222fe885129ca4", _ROWS),
    ("9d333e2f928f358e0dbe834c515aa342", _BATCH),
    ("ad23704e2d6237c1f3df6ec40f603c8b", _PROTO),
    ("fd541ad3a93b3dc67aecfb8f6463bfbd", {"tools": [{"type": "function", "function": _TOOL}]}),
    (
        "cf5074aa68f0d6f8a6a609198edd0cb6",
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
    assert fingerprint(value) == "0c016222f27c5806b220298e35444b4a"
    known, of_a = "<frozenset 90d7c9d8ac79f9c65e7766fb2b987908>", {"<set>": ["a", "b", "c"]}
    assert comparable({"x": value, a: a}, "x") == {
        known: of_a,
        "x": [
            {
                known: 1,
                "<frozenset 5545a943847392c8f02fbbe33c07569d>": 2,
                "<tuple 02e4cf2216300f69e28078c24e52a39b>": 3,
            },
            {"<set>": ["u", "v", of_a, {"<set>": ["x", "y", "z"]}]},
            1.5,
        ],
    }
