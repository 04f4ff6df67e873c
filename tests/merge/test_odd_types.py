"""A field of an odd type, or a row or a token of one, is refused by name and never crashes."""

import copy

import numpy as np
import pytest
import torch

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
    "dict": lambda: {"x": [1, 2]},
    "array": lambda: np.zeros((2, 3), np.int64),
    "tensors": lambda: [torch.zeros(2, 3), torch.zeros(4, 3)],
    "generator": lambda: (i for i in range(2)),
    "odds": lambda: [Odd(), Odd()],
}
TOKENS = ["prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs"]
OTHERS = ["stop_reasons", "trajectory_ids", "is_last_step", "trajectory_time_splits", "custom"]
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


@pytest.mark.parametrize("name", [*TOKENS, *NOT_CARRIED, *OTHERS])
def test_a_field_or_a_row_or_a_token_of_an_odd_type(two_turns, name):
    for make in VALUES.values():
        rows = [make(), *list(two_turns.get(name) or [1, 2])[1:]]
        tokens = copy.deepcopy(two_turns)
        if name in TOKENS:
            tokens[name][1][0] = make()
        for out in (two_turns | {name: make()}, two_turns | {name: rows}, tokens):
            refused_by_name(lambda out: merge(out, ON), out, name)
            refused_by_name(lambda out: concatenate_generator_outputs([out]), out, name)


def jagged(*rows, dtype=torch.int64):
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(
        torch.tensor([x for row in rows for x in row], dtype=dtype), offsets
    )


PACKED_VALUES = {
    "float8": lambda: jagged([1.0], [1.0, 2.0], dtype=torch.float8_e4m3fn),
    "bool": lambda: jagged([True], [True, False], dtype=torch.bool),
    "complex": lambda: jagged([1j], [1j, 2j], dtype=torch.complex64),
    "rows of vectors": lambda: torch.nested.nested_tensor(
        [torch.zeros(1, 3), torch.zeros(2, 3)], layout=torch.jagged
    ),
}


@pytest.mark.parametrize("value", PACKED_VALUES)
@pytest.mark.parametrize("place", ["custom", ("deep", "er", "custom")], ids=["top", "nested"])
def test_packed_values_of_any_dtype_stay_with_their_tokens(value, place):
    batch = pack(turns(([10], [20]), ([10, 20, 30], [40, 41])))
    batch[place] = PACKED_VALUES[value]()
    was = batch[place].values().clone()
    (now,) = merge(batch, ON)[0][place].unbind()
    assert now.dtype == was.dtype
    assert torch.equal(now[[0, 2, 3]].to(torch.complex64), was.to(torch.complex64))
    assert not now[1].to(torch.complex64).any()
