import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlskip.merge import merge
from tests.merge.batches import batches, merge_config, pack, turns, unpack

FIELDS = ("prompt_token_ids", "response_ids", "loss_masks", "rewards", "rollout_logprobs")


@given(batches, st.sampled_from(["adjacent", "chain"]), st.none() | st.integers(1, 12))
def test_a_packed_batch_merges_as_its_lists_do(out, strategy, max_seq_len):
    options = merge_config(strategy=strategy, max_seq_len=max_seq_len)
    uids = [f"uid {i}" for i in range(len(out["response_ids"]))]
    expected, expected_uids, expected_report = merge(out, options, uids)
    merged, merged_uids, report = merge(pack(out), options, uids)
    assert merged_uids == expected_uids
    assert report == expected_report
    lists = unpack(merged)
    for name in lists:
        assert lists[name] == expected[name], name
    assert lists.keys() == {name for name, value in out.items() if isinstance(value, list)}


@pytest.mark.parametrize("prompts", [torch.int32, torch.int64])
@pytest.mark.parametrize("responses", [torch.int32, torch.int64])
@pytest.mark.parametrize("values", [torch.float32, torch.bfloat16, torch.float16])
def test_every_field_keeps_its_type(two_turns, prompts, responses, values):
    batch = pack(
        two_turns,
        prompt_token_ids=prompts,
        response_ids=responses,
        rewards=values,
        rollout_logprobs=values,
    )
    before = {name: batch[name].values().clone() for name in FIELDS}
    merged, _, _ = merge(batch, merge_config())
    for name in FIELDS:
        assert merged[name].dtype == batch[name].dtype
        assert torch.equal(batch[name].values(), before[name])
    assert merged["response_ids"].values().tolist() == [20, 30, 40, 41]
    expected = torch.tensor([-0.5, 0.0, -0.3, -0.4], dtype=values)
    assert torch.equal(merged["rollout_logprobs"].values(), expected)


def test_memory_is_linear_in_the_result():
    length, count = 2_000, 40
    stream = list(range(length * count + 1))
    spans = range(1, length * count, length)
    batch = pack(turns(*((stream[:at], stream[at : at + length // 2]) for at in spans)))
    tracemalloc.start()
    merged, _, _ = merge(batch, merge_config())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    size = sum(merged[name].values().nbytes for name in FIELDS[:3])
    assert len(merged) == 1
    # The input is some twenty times the result.
    assert peak < 2 * size
