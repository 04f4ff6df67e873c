"""The one hash of a prompt: whatever layout or padding its batch has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack

from rlskip.format.prompt_digests import digest_of_batch, digests_of
from rlskip.store import UnsupportedTypeError

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize(
    "other",
    [
        {"text": ["a", "b"], "ids": IDS},
        [{"ids": IDS[0], "text": "a"}, {"text": "b", "ids": IDS[1]}],
        {"ids": IDS.numpy(), "text": np.array(["a", "b"])},
        {"ids": [IDS[0], IDS[1]], "text": np.array(["a", "b"], object)},
        {"ids": torch.nested.as_nested_tensor([*IDS], layout=torch.jagged), "text": ["a", "b"]},
        TensorDict({"ids": IDS, "text": NonTensorStack("a", "b")}, [2]),
        {"ids": IDS, "text": ["a", "b"], "uid": ["x", "y"], "global_steps": 7, "note": None},
        {"ids": IDS, "text": ["a", "b"], "meta_info": {"temperature": 1}},
        [{"ids": IDS[0], "text": "a", "more": None}, {"ids": IDS[1], "text": "b"}],
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_layout_of_a_batch_does_not_count(other: Any) -> None:
    batch = {"ids": IDS, "text": ["a", "b"]}
    digests = digests_of(batch)
    assert digests_of(other) == digests
    assert digest_of_batch(other, digests) == digest_of_batch(batch, digests)
    assert digests_of([{"ids": IDS[1], "text": "b"}]) == digests[1:], "a row alone"


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("dim", [2, 3])
def test_padding_does_not_count(gaps: bool, dim: int) -> None:
    def padded(left: int, right: int, fill: int) -> dict[str, Any]:
        mask = torch.tensor([1, 0, 1] if gaps else [1, 1, 1]).repeat(2, 1)
        ids = IDS.float()
        ids[:, 1] = fill if gaps else ids[:, 1]
        pad = torch.nn.functional.pad
        ids = pad(ids, (left, right), value=fill)
        columns = ids if dim == 2 else torch.stack([ids, ids], dim=1)
        return {"ids": columns, "attention_mask": pad(mask, (left, right))}

    digests = digests_of(padded(0, 0, 7))
    for left, right, fill in ((2, 0, 0), (0, 3, 9), (1, 1, 5)):
        assert digests_of(padded(left, right, fill)) == digests
    rows = [{"ids": IDS.float()[i][[0, 2] if gaps else [0, 1, 2]]} for i in range(2)]
    if dim == 2:
        real = [{**row, "attention_mask": torch.ones(len(row["ids"]), dtype=int)} for row in rows]
        assert digests_of(real) == digests


@pytest.mark.parametrize(
    "other",
    [
        {"ids": IDS.int(), "text": ["a", "b"]},
        {"ids": IDS.tolist(), "text": ["a", "b"]},
        {"ids": IDS, "text": ["a", "c"]},
        {"ids": IDS, "texts": ["a", "b"]},
        {"ids": IDS, "text": ["a", "b"], "tools": "for all"},
        {"ids": IDS.unsqueeze(1), "text": ["a", "b"]},
        {"ids": IDS, "text": ["a", "b"], "attention_mask": torch.tensor([[1, 1, 0]] * 2)},
    ],
    ids=str,
)
def test_everything_else_counts(other: Any) -> None:
    assert digests_of(other)[1] != digests_of({"ids": IDS, "text": ["a", "b"]})[1]


def test_order_and_number_count_in_a_batch() -> None:
    a, b = ["x", "y"], ["y", "x"]
    assert digests_of(a) == digests_of(b)[::-1]
    whole = {digest_of_batch(some, digests_of(some)) for some in (a, b, ["x"], "x", [], "xy")}
    assert len(whole) == 6


def test_what_is_no_batch_is_one_prompt() -> None:
    for prompts in ("a", None, 5, {"a"}, {"depth": 3}, torch.arange(4)):
        assert len(digests_of(prompts)) == 1
    assert len(digests_of([1, 2, 3])) == 3


@pytest.mark.parametrize(
    "prompts",
    [
        {"uid": ["a", "b"], "sample_id": [1, 2]},
        [{"uid": "a"}, {}],
        {"uid": ["a", "b"], "extra_info": [{"uid": 1}, {"request_id": 2}]},
        lazy_stack([TensorDict({"uid": torch.tensor(i)}) for i in range(2)]),
        {"uid": torch.arange(2), "step": NonTensorData(5), "text": None},
    ],
    ids=lambda value: type(value).__name__,
)
def test_prompts_of_which_nothing_is_left_have_no_hash(prompts: Any) -> None:
    assert digests_of(prompts, neutral=["step"]) == [None, None]
    assert digests_of({"own": ["a"]}, without=["own"]) == [None]
    assert digests_of({}) == [None]


def test_a_value_that_cannot_be_compared_is_named() -> None:
    for prompts in ({"a": [1, 2], "tool": [1, object()]}, {"a": [1, 2], "tool": object()}):
        with pytest.raises(UnsupportedTypeError, match=r"^prompts\['tool'\]"):
            digests_of(prompts)


@pytest.mark.parametrize("kind", ["?", "u1", "i4", "i8", "f2", "f4", ">f8", "c8", "U2", "M8[s]"])
@pytest.mark.parametrize("shape", [(3, 4), (3, 2, 4), (3, 4, 0), (1, 1)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_row_of_an_array_is_that_array(kind: str, shape: tuple[int, ...], order: Any) -> None:
    column = np.arange(np.prod(shape)).reshape(shape).astype(kind).astype(kind, order)
    if column.dtype.kind == "f" and column.size > 1:
        column.flat[0], column.flat[1] = -0.0, -np.nan
    assert digests_of({"ids": column}) == digests_of([{"ids": row} for row in column])
