"""No row is sampled twice, none is lost, the oldest come first, stale ones not at all."""

import gc

import pytest
import torch

from rlskip.errors import RlskipError
from rlskip.keys import prompt_tag
from rlskip.queue import (
    KVBatchMeta,
    ReplayBuffer,
    ReplayTimeoutError,
    UnequalFieldsError,
)


def test_clearing_what_was_not_sampled_is_refused(buffer):
    with pytest.raises(RlskipError, match="rollout_root_keys"):
        buffer.clear(KVBatchMeta(keys=["a"], tags=[{}], partition_id="train"))


@pytest.mark.parametrize("step", [1, 2])
def test_a_root_deleted_and_put_again_is_a_new_prompt(buffer, rollouts, queue, step):
    rollouts.counted("u", n=1)
    buffer.sample(1, "train")
    queue.delete(["u"], "train")
    assert buffer.get_sampleable_count(step, "train") == 0
    rollouts.tag("u", prompt_tag(step, 1))
    assert buffer.sample(step, "train")[0].keys == ["u_0_0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({"batch_size": size}, f"at least 1, or None, got {size!r}") for size in (0, 1.5, True)),
        *(({"uids": uids}, "uids must be a set of prompts") for uids in (set(), ["u"], "u")),
        ({"step": "1"}, "whole number, got '1'"),
    ],
)
def test_arguments_that_name_no_groups_are_refused(buffer, rollouts, arguments, message):
    rollouts.counted("u")
    with pytest.raises(ValueError, match=message):
        buffer.sample(**{"step": 1, "partition": "train", **arguments})
    assert len(buffer.sample(torch.tensor(1), "train")[0]) == 2


def test_a_buffer_stays_superseded_once_the_later_one_is_gone(buffer, rollouts, queue):
    rollouts.counted("u")
    assert len(ReplayBuffer(queue).sample(1, "train")[0]) == 2
    gc.collect()
    with pytest.raises(RlskipError, match="another ReplayBuffer was made"):
        buffer.sample(1, "train")


def test_stale_groups_are_dropped_counted_and_replaced(make_buffer, rollouts, queue):
    replaced = []

    def refill(partition, prompts):
        replaced.extend(prompts)
        for prompt in prompts:
            rollouts.counted(prompt.uid + "-new", step=5)
        return [prompt.uid + "-new" for prompt in prompts]

    buffer = make_buffer(refill, max_off_policy_threshold=2, max_off_policy_strategy="drop")
    for step in (3, 4, 5):
        rollouts.counted(f"u{step}", step=step)
    rollouts.counted("stale and incomplete", step=1, error="boom")
    assert buffer.get_sampleable_count(5, "train") == 2
    batch, metrics = buffer.sample(5, "train", 3)
    assert batch.extra_info["rollout_root_keys"][:2] == ["u4", "u5"]
    prefix = "training/off_policy/evicted_samples"
    names = [prefix, *(f"{prefix}_staleness/{name}" for name in ("mean", "max", "min"))]
    assert [metrics[name] for name in names] == [2, 4, 5, 3]
    assert {prompt.uid for prompt in replaced} == {"u3", "stale and incomplete"}
    assert not any(key.startswith("u3_") for key in queue.list("train"))


def test_wait_lets_old_prompts_finish_before_anything_is_sampled(make_buffer, rollouts):
    buffer = make_buffer(max_off_policy_threshold=2, max_off_policy_strategy="wait")
    rollouts.counted("new", step=3)
    rollouts.tag("old", prompt_tag(2, 1))
    assert len(buffer.sample(2, "train", 1)[0]) == 2  # at step 2 `old` is not yet at the threshold
    rollouts.counted("new2", step=3)
    with pytest.raises(ReplayTimeoutError, match="about to be stale") as error:
        buffer.sample(3, "train", 1)
    assert [prompt.uid for prompt in error.value.prompts] == ["old"]
    rollouts.session("old", 0, step=2)
    assert buffer.sample(3, "train", 1)[0].extra_info["rollout_root_keys"] == ["old"]


def test_age_does_not_matter_to_validation_or_to_none(make_buffer, queue, make_rollouts):
    for strategy, partition in (("drop", "val"), ("wait", "val"), ("none", "train")):
        buffer = make_buffer(max_off_policy_threshold=1, max_off_policy_strategy=strategy)
        rollouts = make_rollouts(partition)
        rollouts.counted(strategy, step=1)
        rollouts.tag("in flight", prompt_tag(1, 1))
        batch, _ = buffer.sample(9, partition, 1)
        assert batch.extra_info["rollout_root_keys"] == [strategy]
        buffer.clear(batch)


def test_what_replaces_a_named_prompt_is_waited_for_by_that_call(make_buffer, rollouts, clock):
    def refill(partition, prompts):
        clock.at(clock.now + 1, lambda: rollouts.counted("new"))
        return ["new"]

    buffer = make_buffer(refill, on_incomplete="refill")
    rollouts.counted("u", error="boom")
    rollouts.counted("b")
    uids = {"u"}
    assert buffer.sample(1, "train", uids=uids)[0].extra_info["rollout_root_keys"] == ["new"]
    assert uids == {"new"}
    assert buffer.sample(1, "train")[0].extra_info["rollout_root_keys"] == ["b"]


@pytest.mark.parametrize("fill", [False, True])
def test_rows_of_unequal_fields_are_read_as_collect_returns_them(queue, rollouts, fill):
    rollouts.counted("u")
    queue.put(["u_1_0"], "train", [{"score": 1.0}])
    buffer = ReplayBuffer(queue, {"replay": {}, "dispatch": {"fill_missing": fill}})
    batch, _ = buffer.sample(1, "train")
    if fill:
        assert list(buffer.get(batch)["score"]) == [None, 1.0]
        return
    with pytest.raises(UnequalFieldsError, match=r"session 0 of prompt 'u'.* lacks 'score'"):
        buffer.get(batch)
