import copy

import numpy as np
import pytest
from hypothesis import given

from rlskip.merge import merge_stepwise_output
from tests.merge.batches import batches, greedy


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


@pytest.mark.parametrize("number", [float, int, np.float32])
@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("place", [lambda rows: rows, lambda rows: {"deep": {"er": rows}}])
def test_an_extra_value_per_token_is_carried_whatever_holds_it(two_turns, number, kind, place):
    rows = [kind([number(7)]), kind([number(8), number(9)])]
    merged = merge_stepwise_output(two_turns | {"extra": place(rows)})
    assert merged["response_ids"] == [[20, 30, 40, 41]]
    extra = merged["extra"]
    (values,) = extra["deep"]["er"] if isinstance(extra, dict) else extra
    assert values == kind([7, 0, 8, 9])
    assert isinstance(values[1], int) == (number is int)


@given(batches)
def test_equals_the_greedy_rule_field_by_field_and_leaves_its_input(out):
    before = copy.deepcopy(out)
    merged = merge_stepwise_output(out)
    for name, expected in greedy(before).items():
        assert merged[name] == expected, name
    for name in ("rollout_logprobs", "stop_reasons"):
        assert (merged[name] is None) == (before[name] is None)
    # Nothing is shared.
    for name in ("prompt_token_ids", "response_ids", "loss_masks", "rewards", "rollout_logprobs"):
        for row in merged[name] or []:
            if isinstance(row, list):
                row.append(77)
    assert out == before
