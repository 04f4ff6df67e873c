"""Groups without variance in a metric are rejected, counted and replaced."""

import math

import pytest
import torch

from rlskip.errors import RlskipError
from rlskip.keys import row_tag, status_tag
from rlskip.queue import (
    GroupFilter,
    IncompleteRolloutError,
    ReplayBuffer,
    ReplayTimeoutError,
    to_rows,
)

SAME, MIXED = (1.0, 1.0), (0.0, 1.0)


class Prompts:
    """Prompts whose sessions got these scores; refills with MIXED, unless told otherwise."""

    def __init__(self, queue):
        self.queue, self.scores, self.asked, self.read = queue, [], [], []
        group_filter, config = GroupFilter(self.metric), {"replay": {"timeout_s": 5}}
        self.buffer = ReplayBuffer(queue, config, refill=self.refill, group_filter=group_filter)

    def finish(self, uid, scores, partition="train"):
        keys = [f"{uid}_{session}_0" for session in range(len(scores))]
        rows = [{"score": score} for score in scores]
        if keys:
            self.queue.put(keys, partition, rows, [row_tag(1)] * len(keys))
        status = "finished" if keys else "running"
        self.queue.put([uid], partition, None, [status_tag(1, status, 2)])

    def metric(self, keys, partition):
        self.read += keys
        return [row["score"] for row in to_rows(self.queue.get(list(keys), partition))]

    def refill(self, partition, evicted):
        self.asked.append(len(evicted))
        uids = [f"refill-{sum(self.asked)}-{i}" for i in range(len(evicted))]
        for uid in uids:
            self.finish(uid, self.scores.pop(0) if self.scores else MIXED, partition)
        return uids


@pytest.fixture
def prompts(queue):
    return Prompts(queue)


def test_a_group_of_equal_scores_is_replaced(prompts):
    prompts.finish("a", SAME)
    prompts.finish("b", MIXED)
    prompts.scores = [(0.0, 0.0), MIXED]
    assert prompts.buffer.get_sampleable_count(1, "train") == 1
    assert "a" in prompts.queue.list("train"), "counting evicts nothing"
    batch, metrics = prompts.buffer.sample(1, "train", 2)
    assert {key.split("_")[0] for key in batch.keys} == {"b", "refill-2-0"}
    assert prompts.asked == [1, 1]
    assert metrics["training/filter_groups/evicted_samples"] == 2
    assert "a" not in prompts.queue.list("train")
    assert len(prompts.read) == len({*prompts.read}) == 8, "each row is read once"


def test_validation_is_not_filtered(prompts):
    prompts.finish("a", SAME, "val")
    batch, metrics = prompts.buffer.sample(1, "val", 1)
    assert batch.keys == ["a_0_0", "a_1_0"]
    assert prompts.read == []
    assert not any(metrics.values())


@pytest.mark.parametrize("size", [None, 2])
def test_a_filter_that_rejects_everything_ends_without_a_limit_of_its_own(prompts, size):
    """After replay.max_refills refills for each prompt, not at the timeout."""
    prompts.finish("a", SAME)
    prompts.finish("b", SAME)
    prompts.scores = [SAME] * 6
    with pytest.raises(IncompleteRolloutError, match="'metric' rejected 8 groups") as error:
        prompts.buffer.sample(1, "train", size)
    assert not isinstance(error.value, ReplayTimeoutError)
    assert sum(prompts.asked) == 2 * 3
    assert "0 of 2 groups can be sampled, and 6 more prompts" in error.value.what
    assert "replay.max_refills" in error.value.remedy
    # What could not be replaced is replaced by the next call.
    batch, metrics = prompts.buffer.sample(1, "train", size)
    assert batch.extra_info["rollout_root_keys"] == ["refill-8-0", "refill-8-1"]
    assert metrics["training/filter_groups/evicted_samples"] == 2


def test_a_timeout_says_what_was_rejected(prompts, clock):
    prompts.finish("a", SAME)
    prompts.scores = [()]  # a refill that runs
    with pytest.raises(ReplayTimeoutError, match="'metric' rejected 1 groups"):
        prompts.buffer.sample(1, "train")


@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("scores", [2, 1])
def test_a_metric_that_is_no_number_is_rejected_by_name(prompts, odd, scores, caplog):
    prompts.finish("a", (odd, 1.0)[:scores])
    prompts.queue.put(["a"], "train", None, [{"expected_rollouts": scores}])
    prompts.finish("b", MIXED)
    batch, metrics = prompts.buffer.sample(1, "train", 2)
    assert not [key for key in batch.keys if key.startswith("a_")]
    assert metrics["training/filter_groups/evicted_samples"] == 1
    assert "prompt a is rejected" in caplog.text


@pytest.mark.parametrize(
    "values", [[1.0], [1.0] * 3, None, [[1.0, 2.0]] * 2, torch.ones(2, 2), [10**400] * 2]
)
def test_a_metric_returns_one_number_a_row(queue, prompts, values):
    prompts.finish("a", SAME)
    group_filter = GroupFilter(lambda *_: values)
    buffer = ReplayBuffer(queue, refill=prompts.refill, group_filter=group_filter)
    with pytest.raises(RlskipError, match="for 2 rows") as error:
        buffer.sample(1, "train")
    assert error.value.where == "group_filter"
