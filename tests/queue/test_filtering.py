"""Groups without variance in a metric are rejected, counted and replaced."""

import math

import pytest
import torch

from rlskip.errors import RlskipError
from rlskip.keys import prompt_tag
from rlskip.queue import GroupFilter, ReplayTimeoutError, to_rows

SAME, MIXED = (1.0, 1.0), (0.0, 1.0)


class Prompts:
    """A buffer with a filter by score, which refills prompts with MIXED unless told otherwise."""

    def __init__(self, rollouts, make_buffer):
        self.rollouts, self.queue = rollouts, rollouts.queue
        self.scores, self.asked, self.read = [], [], []
        self.buffer = make_buffer(self.refill, {"group_filter": GroupFilter(self.metric)})

    def finish(self, uid, scores):
        self.rollouts.counted(uid, scores=scores)

    def metric(self, keys, partition):
        self.read += keys
        return [row["score"] for row in to_rows(self.queue.get(list(keys), partition))]

    def refill(self, partition, evicted):
        self.asked.append(len(evicted))
        uids = [f"refill-{sum(self.asked)}-{i}" for i in range(len(evicted))]
        for uid in uids:
            self.finish(uid, self.scores.pop(0) if self.scores else MIXED)
        return uids


@pytest.fixture
def prompts(rollouts, make_buffer):
    return Prompts(rollouts, make_buffer)


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


def test_validation_is_not_filtered(prompts, make_rollouts):
    make_rollouts("val").counted("a", scores=SAME)
    batch, metrics = prompts.buffer.sample(1, "val", 1)
    assert batch.keys == ["a_0_0", "a_1_0"]
    assert prompts.read == []
    assert not any(metrics.values())


def test_a_timeout_says_what_was_rejected(prompts):
    prompts.finish("a", SAME)
    prompts.rollouts.tag("runs", prompt_tag(1, 2))
    with pytest.raises(ReplayTimeoutError, match="'metric' rejected 1 groups"):
        prompts.buffer.sample(1, "train")


@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("scores", [2, 1])
def test_a_metric_that_is_no_number_is_rejected_by_name(prompts, odd, scores, caplog):
    prompts.rollouts.counted("a", n=scores, scores=(odd, 1.0)[:scores])
    prompts.finish("b", MIXED)
    batch, metrics = prompts.buffer.sample(1, "train", 2)
    assert not [key for key in batch.keys if key.startswith("a_")]
    assert metrics["training/filter_groups/evicted_samples"] == 1
    assert "prompt a is rejected" in caplog.text


@pytest.mark.parametrize(
    "values", [[1.0], [1.0] * 3, None, [[1.0, 2.0]] * 2, torch.ones(2, 2), [10**400] * 2]
)
def test_a_metric_returns_one_number_a_row(prompts, make_buffer, values):
    prompts.finish("a", SAME)
    buffer = make_buffer(prompts.refill, {"group_filter": GroupFilter(lambda *_: values)})
    with pytest.raises(RlskipError, match="for 2 rows") as error:
        buffer.sample(1, "train")
    assert error.value.where == "group_filter"
