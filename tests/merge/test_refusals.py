"""Refusals name the field and the row, for lists and packed batches."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlskip.errors import RlskipError
from rlskip.merge import MergeError, concatenate_generator_outputs, merge, merge_stepwise_output
from rlskip.merge.layouts import packed_rows
from rlskip.merge.turns import REQUIRED
from tests.merge.batches import merge_config, pack, turns


def some_rows(ids, is_last):
    out = turns(*(([1], [2]) for _ in ids)) | {"trajectory_ids": ids, "is_last_step": is_last}
    return out | {name: [[0.0] for _ in ids] for name in ("rewards", "rollout_logprobs")}


BOUNDARIES = {
    "not together": (["a", "b", "a"], [True, True, True], "trajectory_ids[2]"),
    "flag missing at a boundary": (["a", "a", "b"], [False, False, True], "is_last_step[1]"),
    "flag missing at the end": (["a", "a"], [False, False], "is_last_step[1]"),
    "flag too early": (["a", "a"], [True, True], "is_last_step[0]"),
    "flag is neither 0 nor 1": (["a", "a"], [0, 2], "is_last_step[1]"),
    "flag is None": (["a", "b"], [None, True], "is_last_step[0]"),
    "too few flags": (["a", "a"], [True], "is_last_step"),
    "an id is missing": (["a", None], [True, True], "trajectory_ids[1]"),
    "no ids": (None, [True], "trajectory_ids"),
    "no flags": (["a"], None, "is_last_step"),
    "no rows": ([], [], "response_ids"),
}


@pytest.mark.parametrize(("ids", "is_last", "where"), BOUNDARIES.values(), ids=BOUNDARIES)
def test_incomplete_trajectories(ids, is_last, where):
    out = some_rows(["a"] if ids is None else ids, is_last) | {"trajectory_ids": ids}
    with pytest.raises(MergeError) as error:
        merge_stepwise_output(out)
    assert error.value.where == where


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"loss_masks": [[1], [1, 1]]}, "loss_masks[1]"),
        ({"rewards": [[0.0], []]}, "rewards[1]"),
        ({"rewards": [[0.0], 1.0]}, "rewards[1]"),
        ({"rewards": [0.0, [1.0]]}, "rewards[1]"),
        ({"rollout_logprobs": [[], [0.0]]}, "rollout_logprobs[0]"),
        ({"rollout_logprobs": [None, [0.0]]}, "rollout_logprobs[0]"),
        ({"loss_masks": [[1], None]}, "loss_masks[1]"),
        ({"response_ids": [[1], (1,)]}, "response_ids[1]"),
        ({"rewards": [np.zeros(1), np.zeros(1)]}, "rewards[0]"),
        ({"rewards": [(0.0,), (0.0,)]}, "rewards[0]"),
        ({"stop_reasons": ["stop"]}, "stop_reasons"),
        ({"prompt_token_ids": [[1]]}, "prompt_token_ids"),
        ({"env_metrics": [{}]}, "env_metrics"),
        ({"trajectory_time_splits": {"llm": [1.0]}}, "trajectory_time_splits.llm"),
        ({"wall_time": 3.0}, "wall_time"),
        *(({name: None}, name) for name in REQUIRED),
    ],
)
def test_fields_that_do_not_fit(change, where):
    with pytest.raises(MergeError) as error:
        merge_stepwise_output(some_rows(["a", "a"], [False, True]) | change)
    assert error.value.where == where


@pytest.mark.parametrize(
    "rows",
    [
        [["a"], ["b", "c"]],
        [[None], [0.5, 1.0]],
        [[[1, 2]], [[3, 4], [5]]],
        [np.zeros(1), [0.0, 0.0]],
        [torch.zeros(1), torch.zeros(2)],
    ],
)
def test_values_per_token_of_other_kinds_are_not_cut(two_turns, rows):
    with pytest.raises(MergeError) as error:
        merge_stepwise_output(two_turns | {"extra": {"deep": rows}})
    assert error.value.where == "extra.deep"
    # Where no turns are merged, or the entries are not values per token, they stay as they are.
    apart = two_turns | {"prompt_token_ids": [[1], [2]]}
    assert merge_stepwise_output(apart | {"extra": rows})["extra"] == rows
    assert merge_stepwise_output(two_turns | {"extra": [rows[0]] * 2})["extra"] == rows[:1]
    by_chance = turns(([10], [20]), ([10, 20, 30], [40])) | {"extra": [["a"], ["b"]]}
    assert merge_stepwise_output(by_chance)["extra"] == [["b"]]


def test_a_refusal_is_of_every_type_that_callers_expect():
    """SkyRL raises AssertionError in these cases."""
    assert issubclass(MergeError, RlskipError)
    assert issubclass(MergeError, ValueError)
    assert issubclass(MergeError, AssertionError)


def jagged(*rows):
    return torch.nested.nested_tensor([torch.ones(row) for row in rows], layout=torch.jagged)


def with_gaps():
    starts, lengths = torch.zeros(2, dtype=torch.long), torch.tensor([1, 2])
    ids = torch.ones(2, 3, dtype=torch.int32)
    return torch.nested.narrow(ids, 1, starts, lengths, layout=torch.jagged)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"loss_masks": [[1], [1, 1]]}, "loss_masks[1]"),
        ({"rollout_logprobs": [[], [0.0]]}, "rollout_logprobs[0]"),
        ({"is_last_step": [True, True]}, "is_last_step[0]"),
        ({"trajectory_ids": [0, 1]}, "is_last_step[0]"),
        ({"trajectory_ids": None}, "trajectory_ids"),
        ({"loss_masks": [1, 1]}, "loss_masks"),
        ({"response_ids": None}, "response_ids"),
        ({"pixel_values": [1.0, 2.0]}, "pixel_values"),
        ({"prompt_token_ids": with_gaps()}, "prompt_token_ids"),
        ({"custom": jagged((3, 1), (3, 2))}, "custom"),  # ragged in the second dimension
    ],
)
def test_packed_fields_that_do_not_fit(change, where):
    out = some_rows([0, 0], [False, True])
    batch = pack(out)
    for name, value in change.items():
        if value is None:
            del batch[name]
        else:
            as_it_is = isinstance(value, torch.Tensor)
            batch[name] = value if as_it_is else pack(out | {name: value})[name]
    with pytest.raises(MergeError) as error:
        packed_rows(batch)
    assert error.value.where == where


def test_a_packed_batch_without_rows():
    empty = torch.nested.nested_tensor_from_jagged(torch.zeros(0), torch.zeros(1).long())
    names = ("prompt_token_ids", "response_ids", "loss_masks")
    with pytest.raises(MergeError) as error:
        packed_rows(TensorDict(dict.fromkeys(names, empty), batch_size=[0]))
    assert error.value.where == "response_ids"


@pytest.mark.parametrize("uids", [["p"], 5, {"x": 1}, {1, 2}, iter("ab")])
def test_uids_are_a_sequence_of_one_entry_per_row(two_turns, uids):
    with pytest.raises(MergeError) as error:
        merge(two_turns, merge_config(), uids)
    assert error.value.where == "uids"


@pytest.mark.parametrize("value", ["ab", [torch.zeros(2), 1], [iter("ab")]])
def test_a_batch_of_an_odd_type_or_with_an_odd_token(two_turns, value):
    for call in (lambda out: merge(out, merge_config()), concatenate_generator_outputs):
        with pytest.raises(MergeError):
            call(value)
    two_turns["loss_masks"][1][0] = value
    with pytest.raises(MergeError) as error:
        merge(two_turns, merge_config())
    assert error.value.where == "loss_masks[1][0]"


@pytest.mark.parametrize("name", ["prompt_token_ids", "response_ids"])
@pytest.mark.parametrize("value", [1.5, 1.0, "1", None, [1], 1 << 63])
def test_a_token_that_is_no_id(two_turns, name, value):
    two_turns[name][1][0] = value
    with pytest.raises(MergeError) as error:
        merge(two_turns, merge_config())
    assert error.value.where == f"{name}[1][0]"


@pytest.mark.parametrize("value", [-1, 1 << 31, 1 << 40, -(1 << 62), np.int64(7), torch.tensor(8)])
def test_a_token_that_is_one(value):
    out = turns(([value], [2]), ([value, 2, 3], [value]))
    assert merge_stepwise_output(out)["response_ids"] == [[2, 3, value]]
