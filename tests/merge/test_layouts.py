import copy
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict, lazy_stack

from rlskip.merge import MergeError, merge, merge_stepwise_output
from tests.merge.batches import batches, greedy, merge_config, pack, turns, unpack


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


# -- packed ----------------------------------------------------------------------------------------


@given(batches, st.sampled_from(["adjacent", "chain"]), st.none() | st.integers(1, 12))
def test_a_packed_batch_merges_as_its_lists_do(out, strategy, max_seq_len):
    options = merge_config(strategy=strategy, max_seq_len=max_seq_len)
    uids = [f"uid {i}" for i in range(len(out["response_ids"]))]
    expected, expected_uids, expected_report = merge(out, options, uids)
    merged, merged_uids, report = merge(pack(out), options, uids)
    assert merged_uids == expected_uids
    assert (report, report.breaks) == (expected_report, expected_report.breaks)
    lists = unpack(merged)
    for name in lists:
        assert lists[name] == expected[name], name
    assert lists.keys() == {name for name, value in out.items() if isinstance(value, list)}


def test_a_nested_field_keeps_the_last_turns_values():
    batch = pack(turns(([1], [2]), ([1, 2], [3])))
    values = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    batch["env"] = TensorDict({"values": values, "reward": torch.tensor([0.0, 1.0])}, [2])
    merged, _, _ = merge(batch, merge_config())
    assert merged["env", "values"].unbind()[0].tolist() == [1.0] * 3
    assert merged["env", "reward"].tolist() == [1.0]


def test_values_per_token_in_lists_stay_with_their_tokens():
    batch = pack(turns(([1], [2]), ([1, 2, 9], [3, 4])))
    batch["advantages"] = NonTensorStack([0.5], [1.5, 2.5])
    merged, _, _ = merge(batch, merge_config())
    assert unpack(merged)["advantages"] == [[0.5, 0.0, 1.5, 2.5]]
    batch["texts"] = NonTensorStack(["a"], ["b", "c"])
    with pytest.raises(MergeError, match="texts: it has values per token"):
        merge(batch, merge_config())


@pytest.mark.parametrize(
    "of", [lambda rows: TensorDict(dict(rows.items()), []), lambda rows: lazy_stack([rows])]
)
def test_a_packed_batch_is_one_tensordict_of_rows(of):
    with pytest.raises(MergeError, match="batch size"):
        merge(of(pack(turns(([1], [2])))), merge_config())


def test_memory_is_linear_in_the_result():
    length, count = 2_000, 40
    stream = list(range(length * count + 1))
    spans = range(1, length * count, length)
    batch = pack(turns(*((stream[:at], stream[at : at + length // 2]) for at in spans)))
    tracemalloc.start()
    merged, _, _ = merge(batch, merge_config())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    size = sum(
        merged[name].values().nbytes for name in ("prompt_token_ids", "response_ids", "loss_masks")
    )
    assert len(merged) == 1
    # The input is some twenty times the result.
    assert peak < 2 * size


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16])
def test_packed_responses_take_the_wider_ids_of_prompts(two_turns, dtype):
    two_turns["prompt_token_ids"][1][2] = 70_000
    merged = merge(pack(two_turns, response_ids=dtype), merge_config())[0]["response_ids"]
    assert merged.dtype == torch.int32
    assert merged.values().tolist() == [20, 70_000, 40, 41]


def of_values(values):
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, 3]))


PACKED_VALUES = {
    "float8": lambda: of_values(torch.tensor([1.0, 1.0, 2.0]).to(torch.float8_e4m3fn)),
    "bool": lambda: of_values(torch.tensor([True, True, False])),
    "complex": lambda: of_values(torch.tensor([1j, 1j, 2j])),
    "strided": lambda: of_values(torch.tensor([1.0, 9.0, 1.0, 9.0, 2.0])[::2]),
    "vectors in another order": lambda: of_values(torch.arange(1.0, 7.0).reshape(2, 3).t()),
    "conjugate": lambda: of_values(torch.tensor([1j, 2j, 3j]).conj()),
    "negative": lambda: of_values(torch.tensor([1j, 2j, 3j]).conj().imag),
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
    (now,) = merge(batch, merge_config())[0][place].unbind()
    assert now.dtype == was.dtype
    assert torch.equal(now[[0, 2, 3]].to(torch.complex64), was.to(torch.complex64))
    assert not now[1].to(torch.complex64).any()
