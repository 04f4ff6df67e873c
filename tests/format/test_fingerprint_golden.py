"""Fingerprints that dumps of rlskip 0.1 carry: another value would make them all mismatch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rlskip.batch.tables import DataProtoParts
from rlskip.store import Identity, fingerprint

# Computed by rlskip 0.1.0.
_GOLDEN = {
    "tokens": "e0ef101781e41d95f6443e1e8c8f9292",
    "tokens of numpy": "e0ef101781e41d95f6443e1e8c8f9292",
    "tokens, transposed": "47e74152471ef71bba3c0441ad4c4136",
    "int32 tokens": "8e6e53f2b87cb1dc2fa6a39f93b75ace",
    "mask": "204729c12cf4f9c7d5605aa72b024def",
    "floats": "93e6bff8f49dce59d1d39baf11d5aca7",
    "half": "04ad570fd138db9ca1fdac8dd44a7827",
    "lists of tokens": "c26dceba40ac16692f956459da67b4bc",
    "strings": "3f3dcdfa0d0ffb9d392682f5c845d425",
    "one string": "68c231df7ad7d8bb5c1576c27c258a49",
    "chats": "3ab44d0842fc026e338c3781d1983e2d",
    "chats in an object array": "3ab44d0842fc026e338c3781d1983e2d",
    "lists of dicts": "f21da0e92b65fe1d2a3a6094cab3a011",
    "columns": "b928afe61de962e093e2509804af3d93",
    "TensorDict": "08bb05174896d22c0e20e44ed2b2b0d7",
    "TensorDict, jagged and of objects": "151d236ce2fd037e6b611eac6112115b",
    "jagged": "196ffab71760443e9c791cd97b733d3f",
    "DataProto": "9d71094f5f47ec5bf39ae5fa72a98ea8",
    "DataProto without tensors": "453af68626717952aecf27319c721a9c",
    "numpy text": "ec2b3c0a22cbb7260d0bfc72b6f10a7b",
    "bytes": "a3ad63be332279ebaa9a2a70db0bca3c",
    "tools": "7eb7e1e5cfc57ed26a2b35b65278142c",
    "scalars": "9e84f9bd65399c7483817101f0d198b8",
    "dtype and size": "5d325a32272d0d7a9a884427a5622584",
}


def _ordinary() -> Iterator[tuple[str, Any]]:
    """Prompts as trainers have them."""
    ids = torch.arange(12).reshape(3, 4)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "é"}]
    offsets = torch.tensor([0, 2, 5])
    yield "tokens", ids
    yield "tokens of numpy", ids.numpy()
    yield "tokens, transposed", torch.arange(12).reshape(4, 3).T
    yield "int32 tokens", ids.to(torch.int32)
    yield "mask", ids > 4
    yield "floats", torch.linspace(-1, 1, 6)
    yield "half", torch.linspace(-1, 1, 6, dtype=torch.bfloat16)
    yield "lists of tokens", [[1, 2, 3], [4], []]
    yield "strings", ["a", "b", "é", ""]
    yield "one string", "What is 2 + 2?"
    yield "chats", [chat, chat[:1]]
    yield "chats in an object array", np.array([chat, chat[:1]], object)
    yield (
        "lists of dicts",
        [
            {
                "prompt": chat,
                "uid": "1",
                "n": 8,
                "temperature": 1.0,
                "greedy": False,
                "tools": None,
            },
            {"prompt": chat[:1], "uid": "2"},
        ],
    )
    yield (
        "columns",
        {"prompt": ["a", "b"], "answer": ("1", "2"), "uid": ["x", "y"], "level": [1, 2.5]},
    )
    yield (
        "TensorDict",
        TensorDict(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids), "uid": torch.arange(3)}, [3]
        ),
    )
    td = TensorDict({"input_ids": ids[:2], "nested": TensorDict({"x": ids[:2]}, [2])}, [2])
    td["prompts"] = torch.nested.nested_tensor_from_jagged(torch.arange(5), offsets)
    td.set("each", NonTensorStack("a", "b"))
    td.set("all", NonTensorData(data="maths", batch_size=[2]))
    yield "TensorDict, jagged and of objects", td
    yield "jagged", torch.nested.nested_tensor_from_jagged(torch.arange(10).reshape(5, 2), offsets)
    yield (
        "DataProto",
        DataProtoParts(
            TensorDict({"input_ids": ids}, [3]),
            {
                "raw_prompt": np.array([chat, chat[:1], []], object),
                "uid": np.array(["1", "2", "3"], object),
                "index": np.array([1, 2, 3]),
            },
            {"global_steps": 7},
        ),
    )
    yield (
        "DataProto without tensors",
        DataProtoParts(None, {"raw_prompt": np.array([chat, chat[:1]], object)}, {}),
    )
    yield "numpy text", np.array(["a", "bc"])
    yield "bytes", [b"a", bytearray(b"b")]
    yield (
        "tools",
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"x": {"type": "integer"}, 1: {2, 3}}},
                }
            ]
        },
    )
    yield "scalars", [None, True, 1, 1.5, 2**70, 1e300, float("nan"), 1j]
    yield "dtype and size", {"dtype": torch.bfloat16, "size": torch.Size([2, 3])}


def test_ordinary_prompts_keep_their_0_1_fingerprints() -> None:
    assert {name: fingerprint(prompts) for name, prompts in _ordinary()} == _GOLDEN


def test_sets_of_text_are_the_same_in_every_process() -> None:
    """Computed by other processes, each of which gives the strings of a set another order."""
    a, b = frozenset("abc"), frozenset("xyz")
    value = [{a: 1, b: 2, ("t", a): 3}, {a, b, "u", "v"}, 1.5]
    assert fingerprint(value) == "3172229399d38fd85d5f4bef9e2f8dae"
    known, of_a = "<frozenset 3d496830cdfdeb4cdbb577a72cb41a71>", {"<set>": ["a", "b", "c"]}
    assert Identity(extra={"x": value, a: a}).as_json()["extra"] == {
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
