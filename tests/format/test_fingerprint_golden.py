"""Fingerprints, pinned: dumps carry them, and another value would make all of them mismatch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rlskip.batch.tables import DataProtoParts
from rlskip.store import fingerprint
from rlskip.store.identity import comparable

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
    ("6fe3bef0ba2634357f667e0ed89880b3", _IDS),
    ("6fe3bef0ba2634357f667e0ed89880b3", _IDS.numpy()),
    ("56eb0fbef60cf85fe5c9b3e50b087fa3", torch.arange(12).reshape(4, 3).T),
    ("e268b54ebfc59a48afd483cffa8709c3", torch.linspace(-1, 1, 6, dtype=torch.bfloat16)),
    ("ce60634b14275b83269c370194e63e55", [[1, 2, 3], [4], []]),
    ("6bb070de4987fa9a273d6a11fa691f75", ["a", "b", "é", ""]),
    ("4c8e5117909b57a6dd11a9a585907fee", [_CHAT, _CHAT[:1]]),
    ("4c8e5117909b57a6dd11a9a585907fee", np.array([_CHAT, _CHAT[:1]], object)),
    ("64d64ab5639d5f81ac8d8a4fa8df9aec", _ROWS),
    ("09ccdfc97b56198c9c799d66972c7b2d", _BATCH),
    ("8b2e67978e0f3fa5fa5b5b52cd663cf0", _PROTO),
    ("1830a6c1ee277b0a6d14ad64984b9713", {"tools": [{"type": "function", "function": _TOOL}]}),
    (
        "0d149c4d8e325bc9588bee9e4de635aa",
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
    assert fingerprint(value) == "df0815457ac4d0a6cfea088ea211f7fc"
    known, of_a = '<key {"<set>": ["a", "b", "c"]}>', {"<set>": ["a", "b", "c"]}
    assert comparable({"x": value, a: a}, "x") == {
        known: of_a,
        "x": [
            {
                known: 1,
                '<key {"<set>": ["x", "y", "z"]}>': 2,
                '<key ["t", {"<set>": ["a", "b", "c"]}]>': 3,
            },
            {"<set>": ["u", "v", of_a, {"<set>": ["x", "y", "z"]}]},
            1.5,
        ],
    }
