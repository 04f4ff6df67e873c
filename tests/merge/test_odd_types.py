"""A field of an odd type, or a row or a token of one, is refused by name and never crashes."""

import copy

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from rlskip.merge import MergeError, concatenate_generator_outputs, merge
from rlskip.merge.turns import NOT_CARRIED
from tests.merge.batches import merge_config, pack, turns

ON = merge_config()


class Odd:
    """Compares and has a length in the most unhelpful way."""

    def __len__(self):
        raise RuntimeError("no length")

    def __eq__(self, other):
        raise RuntimeError("no comparison")

    __hash__ = None


VALUES = {
    "int": lambda: 5,
    "str": lambda: "ab",
    "None": lambda: None,
    "dict": lambda: {"x": [1, 2]},
    "set": lambda: {1, 2},
    "tuple": lambda: (1, 2),
    "list": lambda: [1, 2],
    "nested list": lambda: [[1], [1, 2]],
    "array": lambda: np.zeros((2, 3), np.int64),
    "tensors": lambda: [torch.zeros(2, 3), torch.zeros(4, 3)],
    "TensorDict": lambda: TensorDict({"x": torch.zeros(2)}, [2]),
    "generator": lambda: (i for i in range(2)),
    "odd": Odd,
    "odds": lambda: [Odd(), Odd()],
    "strings": lambda: ["a", "b"],
}

TOKENS = ["prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs"]
FIELDS = [
    *TOKENS,
    *NOT_CARRIED,
    "stop_reasons",
    "trajectory_ids",
    "is_last_step",
    "rollout_metrics",
    "trajectory_generation_times",
    "trajectory_time_splits",
    "custom",
]
CALLS = {
    "merge": lambda out: merge(out, ON),
    "chain": lambda out: merge(out, merge_config(strategy="chain")),
    "concatenate": lambda out: concatenate_generator_outputs([out, copy.copy(out)]),
    "step-wise": lambda out: concatenate_generator_outputs([out], step_wise=True),
}


# A row that is odd only beside others is found when they are compared.
FOUND_AT = {
    "trajectory_ids": ("trajectory_ids", "is_last_step"),
    "response_ids": ("response_ids", "loss_masks"),
}


def refused_by_name(call, out, name):
    """Whether the call refused the batch; a refusal names the field, and nothing else is raised."""
    where = None
    try:
        call(out)
    except MergeError as error:
        where = error.where
    assert where is None or where.startswith(FOUND_AT.get(name, name))
    return where is not None


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", FIELDS)
def test_a_field_or_a_row_or_a_token_of_an_odd_type(two_turns, call, name):
    for make in VALUES.values():
        refused_by_name(CALLS[call], two_turns | {name: make()}, name)
        if name != "rollout_metrics":
            rows = [make(), *list(two_turns.get(name) or [1, 2])[1:]]
            refused_by_name(CALLS[call], two_turns | {name: rows}, name)
        if name in TOKENS:
            rows = [list(row) for row in two_turns[name]]
            rows[1][0] = make()
            refused_by_name(CALLS[call], two_turns | {name: rows}, name)


@pytest.mark.parametrize("value", VALUES)
def test_a_batch_or_a_list_of_batches_of_an_odd_type(value):
    for call in (CALLS["merge"], concatenate_generator_outputs):
        with pytest.raises(MergeError):
            call(VALUES[value]())


def test_uids_of_an_odd_type(two_turns):
    refused = {
        value
        for value, make in VALUES.items()
        if refused_by_name(lambda uids: merge(two_turns, ON, uids), make(), "uids")
    }
    assert refused >= {"int", "dict", "set", "generator", "odd"}
    assert not refused & {"None", "tuple", "list", "strings"}


def jagged(*rows, dtype=torch.int64):
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(
        torch.tensor([x for row in rows for x in row], dtype=dtype), offsets
    )


PACKED_VALUES = {
    "dense": lambda: torch.zeros(2, 3),
    "strings": lambda: NonTensorStack("a", "b"),
    "floats": lambda: jagged([1.0], [1.0, 2.0], dtype=torch.float32),
    "float8": lambda: jagged([1.0], [1.0, 2.0], dtype=torch.float8_e4m3fn),
    "bool": lambda: jagged([True], [True, False], dtype=torch.bool),
    "complex": lambda: jagged([1j], [1j, 2j], dtype=torch.complex64),
    "with a gradient": lambda: jagged([1.0], [1.0, 2.0], dtype=torch.float32).requires_grad_(),
    "meta": lambda: jagged([1.0], [1.0, 2.0], dtype=torch.float32).to("meta"),
    "strided": lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]),
    "rows of vectors": lambda: torch.nested.nested_tensor(
        [torch.zeros(1, 3), torch.zeros(2, 3)], layout=torch.jagged
    ),
    "ragged in the second dimension": lambda: torch.nested.nested_tensor(
        [torch.zeros(3, 1), torch.zeros(3, 2)], layout=torch.jagged
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("strategy", ["adjacent", "chain"])
@pytest.mark.parametrize("name", [name for name in FIELDS if name != "rollout_metrics"])
def test_a_packed_field_of_an_odd_type(two_turns, strategy, name):
    for make in PACKED_VALUES.values():
        batch = pack(two_turns)
        batch[name] = make()
        refused_by_name(lambda batch: merge(batch, merge_config(strategy=strategy)), batch, name)


@pytest.mark.parametrize("value", ["float8", "complex", "bool", "rows of vectors"])
@pytest.mark.parametrize("place", ["custom", ("deep", "er", "custom")], ids=["top", "nested"])
def test_packed_values_of_any_dtype_stay_with_their_tokens(value, place):
    batch = pack(turns(([10], [20]), ([10, 20, 30], [40, 41])))
    batch[place] = PACKED_VALUES[value]()
    was = batch[place].values().clone()
    (now,) = merge(batch, ON)[0][place].unbind()
    assert now.dtype == was.dtype
    assert torch.equal(batch[place].values().to(torch.complex64), was.to(torch.complex64))
    assert torch.equal(now[[0, 2, 3]].to(torch.complex64), was.to(torch.complex64))
    assert not now[1].to(torch.complex64).any()


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16])
def test_packed_responses_take_the_wider_ids_of_prompts(two_turns, dtype):
    two_turns["prompt_token_ids"][1][2] = 70_000
    merged = merge(pack(two_turns, response_ids=dtype), ON)[0]["response_ids"]
    assert merged.dtype == torch.int32
    assert merged.values().tolist() == [20, 70_000, 40, 41]
