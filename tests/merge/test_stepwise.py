import copy

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlskip.merge import merge_stepwise_output

FIELDS = (
    "prompt_token_ids",
    "response_ids",
    "rewards",
    "loss_masks",
    "rollout_logprobs",
    "stop_reasons",
    "trajectory_ids",
    "is_last_step",
)


def test_the_observation_is_masked_and_the_last_turn_speaks_for_the_row(two_turns):
    merged = merge_stepwise_output(two_turns)
    assert {name: merged[name] for name in FIELDS} == {
        "prompt_token_ids": [[10]],
        "response_ids": [[20, 30, 40, 41]],
        "rewards": [[1.0, 0.0, 0.0, 5.0]],
        "loss_masks": [[1, 0, 1, 1]],
        "rollout_logprobs": [[-0.5, 0.0, -0.3, -0.4]],
        "stop_reasons": ["eos"],
        "trajectory_ids": ["a"],
        "is_last_step": [True],
    }


def test_other_fields_keep_the_last_turns_value(two_turns):
    two_turns |= {
        "trajectory_generation_times": [2.0, 3.0],
        "trajectory_time_splits": {"llm": [1.0, 2.0], "env": [0.5, 0.25]},
        "env_metrics": [{"solved": 0}, {"solved": 1}],
        "pixel_values": None,
    }
    merged = merge_stepwise_output(two_turns)
    assert merged["trajectory_generation_times"] == [3.0]
    assert merged["trajectory_time_splits"] == {"llm": [2.0], "env": [0.25]}
    assert merged["env_metrics"] == [{"solved": 1}]
    assert merged["pixel_values"] is None
    assert merged["rollout_metrics"]["generate/trajectory_completion_time_max"] == 3.0


def test_an_extra_field_of_numpy_numbers_is_carried_as_well(two_turns):
    two_turns["entropies"] = [[np.float32(0.5)], [np.float32(1.5), np.float32(2.5)]]
    assert merge_stepwise_output(two_turns)["entropies"] == [[0.5, 0.0, 1.5, 2.5]]


def test_an_extra_value_per_token_is_carried_for_every_token(two_turns):
    lengths = [len(response) for response in two_turns["response_ids"]]
    two_turns["ref_logprobs"] = [[-0.5] * length for length in lengths]
    two_turns["ages"] = [[7] * length for length in lengths]
    merged = merge_stepwise_output(two_turns)
    (tokens,), (mask,) = merged["response_ids"], merged["loss_masks"]
    assert len(tokens) > sum(lengths)
    for name, value in (("ref_logprobs", -0.5), ("ages", 7)):
        (found,) = merged[name]
        assert len(found) == len(tokens)
        assert found.count(value) == sum(lengths)
        assert all(type(number) is type(value) for number in found)
    assert [age > 0 for age in merged["ages"][0]].count(False) == len(tokens) - sum(lengths)
    assert len(mask) == len(tokens)


@given(st.data())
@settings(deadline=None)
def test_equals_the_greedy_rule_field_by_field(batches, greedy, data):
    out = data.draw(batches)
    merged = merge_stepwise_output(out)
    for name, expected in greedy(out).items():
        assert merged[name] == expected, name
    for name in ("rollout_logprobs", "stop_reasons"):
        assert (merged[name] is None) == (out[name] is None)


@given(st.data())
@settings(deadline=None)
def test_merging_twice_changes_nothing_more(batches, data):
    once = merge_stepwise_output(data.draw(batches))
    assert merge_stepwise_output(once) == once


@given(st.data())
@settings(deadline=None)
def test_the_input_is_neither_changed_nor_shared(batches, data):
    out = data.draw(batches)
    before = copy.deepcopy(out)
    merged = merge_stepwise_output(out)
    for name in ("prompt_token_ids", "response_ids", "loss_masks", "rewards", "rollout_logprobs"):
        for row in merged[name] or []:
            if isinstance(row, list):
                row.append(77)
    assert out == before
