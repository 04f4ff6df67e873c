"""What becomes of groups that are incomplete, by policy, stale, or without variance."""

import functools
import math

import pytest
import torch

from rlskip.errors import RlskipError
from rlskip.keys import prompt_tag, split_trajectory
from rlskip.queue import (
    GroupFilter,
    IncompleteRolloutError,
    ReplayBuffer,
    ReplayTimeoutError,
    to_rows,
)
from tests.queue.conftest import Rollouts
from tests.queue.queue_tests import PolledQueue


@pytest.mark.parametrize("policy", ["drop", "refill"])
def test_a_batch_of_validation_is_smaller_by_what_was_dropped(make_buffer, queue, policy, clock):
    """And is never refilled: a refill submits a training prompt."""
    refilled = []
    buffer = make_buffer(lambda *args: refilled.append(args), on_incomplete=policy)
    rollouts = Rollouts(queue, "val")
    for uid in ("a", "b", "c"):
        rollouts.counted(uid)
    rollouts.counted("incomplete", error="boom")
    batch, metrics = buffer.sample(1, "val", 3)
    assert clock.waits == refilled == []
    assert batch.extra_info["rollout_root_keys"] == ["a", "b"]
    assert metrics["validation/rollout_failure/evicted_samples"] == 1
    assert metrics["validation/rollout_failure/refilled_samples"] == 0
    assert buffer.sample(1, "val", 1)[0].extra_info["rollout_root_keys"] == ["c"]
    for size in (None, 1):
        rollouts.counted("all of them", error="boom")
        with pytest.raises(IncompleteRolloutError, match="every prompt was dropped"):
            buffer.sample(1, "val", size)


def test_min_viable_takes_the_sessions_that_succeeded(make_buffer, rollouts, queue, caplog):
    buffer = make_buffer(on_incomplete="min_viable", min_viable=2)
    rollouts.counted("short", n=3)
    rollouts.session("short", 1, rows=0, error="boom")  # its row exists and must not be trained on
    rollouts.finished("greedy", n=1, status="failure")
    batch, metrics = buffer.sample(1, "train")
    assert batch.keys == ["short_0_0", "short_2_0", "greedy_0_0"]
    assert metrics["training/rollout_failure/short_samples"] == 2
    assert "short: expected 3, got 2" in caplog.text
    buffer.clear(batch)
    assert queue.list("train") == {}


# -- refill ------------------------------------------------------------------------------------


def test_a_prompt_put_again_with_equal_tags_is_seen_by_a_watch_that_polls():
    """Deleted and put again between two listings."""
    queue = PolledQueue()
    rollouts, buffer = Rollouts(queue), ReplayBuffer(queue)
    for _ in range(2):
        rollouts.counted("u", n=1)
        batch, _ = buffer.sample(1, "train")
        assert batch.keys == ["u_0_0"]
        buffer.clear(batch)


SAME, MIXED = (1.0, 1.0), (0.0, 1.0)


class Trainer:
    """Refills prompts, filters by score, and is told of evictions; one of these may fail once."""

    def __init__(self, rollouts, make_buffer, fails=("nothing", None), **replay):
        self.rollouts, self.fails = rollouts, dict([fails])
        self.ends = [{"scores": MIXED}]  # of prompts that it submits; the last is that of all more
        self.asked, self.read, self.told = [], [], []
        more = {"group_filter": GroupFilter(self.scores), "on_evict": self.on_evict}
        self.buffer = make_buffer(self.refill, more, **replay)

    def refill(self, partition, prompts):
        if "refill" in self.fails:
            return self.fails.pop("refill")(self.rollouts)
        self.asked += prompts
        uids = [f"new-{len(self.asked)}-{i}" for i in range(len(prompts))]
        for uid in uids:
            its = self.ends.pop(0) if len(self.ends) > 1 else self.ends[0]
            self.rollouts.counted(uid, **its)
        return uids

    def scores(self, keys, partition):
        self.fails.pop("metric", int)()
        self.read += keys
        return [
            row["score"] for row in to_rows(self.rollouts.queue.get(keys, partition, ["score"]))
        ]

    def on_evict(self, batch):
        self.fails.pop("on_evict", int)()
        self.told += batch.extra_info["rollout_root_keys"]


@pytest.fixture
def make_trainer(rollouts, make_buffer):
    return functools.partial(Trainer, rollouts, make_buffer)


@pytest.fixture
def trainer(make_trainer):
    return make_trainer()


NO_USE = {
    "fails": ({"error": "boom"}, "new-4-1: expected 2, got 0"),
    "is rejected": ({"scores": SAME}, "the filter 'scores' rejected 6 groups"),
}


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("what", NO_USE)
def test_refills_of_no_use_end_at_the_bound_and_not_at_the_timeout(
    make_trainer, rollouts, what, size
):
    written, said = NO_USE[what]
    trainer = make_trainer(on_incomplete="refill", max_refills=2)
    trainer.ends = [written] * 4
    for uid in ("a", "b"):
        rollouts.counted(uid, **written)
    with pytest.raises(IncompleteRolloutError, match=said) as error:
        trainer.buffer.sample(1, "train", size)
    assert not isinstance(error.value, ReplayTimeoutError)
    assert "0 of 2 groups can be sampled, and 4 more prompts" in error.value.what
    assert "replay.max_refills" in error.value.remedy
    assert (len(trainer.asked), len(error.value.prompts)) == (4, 2)
    # What could not be replaced is replaced by the next call.
    trainer.ends = [{"scores": MIXED}]
    batch, _ = trainer.buffer.sample(1, "train", size)
    assert batch.extra_info["rollout_root_keys"] == ["new-6-0", "new-6-1"]


def end_of_data(*_):
    raise StopIteration("the data set is at its end")


def of_another_step(rollouts):
    rollouts.queue.put(["other"], "val", None, [prompt_tag(5, 1)])
    return ["other", "another"]


FAILS = {
    "the refill raises": ("refill", end_of_data),
    "it returns too few": ("refill", lambda _: ["one"]),
    "it returns one twice": ("refill", lambda _: ["one", "one"]),
    "it returns no uids": ("refill", lambda _: [None]),
    "it returns a prompt that is there": ("refill", lambda _: ["fine", "a"]),
    "it returns what is not in the partition": ("refill", of_another_step),
    "the filter raises": ("metric", end_of_data),
    "who is told raises": ("on_evict", end_of_data),
}
EVICTED = {
    "incomplete": ({"on_incomplete": "refill"}, lambda r, u: r.counted(u, step=5, error="boom")),
    "stale": (
        {"max_off_policy_threshold": 1, "max_off_policy_strategy": "drop"},
        lambda r, u: r.counted(u, step=1, scores=MIXED),
    ),
}


@pytest.mark.parametrize("how", FAILS)
@pytest.mark.parametrize("kind", EVICTED)
def test_what_raises_leaves_the_step_as_it_was(make_trainer, queue, rollouts, kind, how):
    replay, write = EVICTED[kind]
    trainer = make_trainer(FAILS[how], **replay)
    trainer.ends = [{"step": 5, "scores": MIXED}]
    rollouts.counted("fine", step=5, scores=MIXED)
    for uid in ("a", "b"):
        write(rollouts, uid)
    queue.put(["a_0_0"], "train", [{"only here": 1}])  # its rows hold different fields
    before = queue.list("train")
    rows = {key: to_rows(queue.get([key], "train")) for key in before if split_trajectory(key)}
    with pytest.raises((RlskipError, StopIteration)):
        trainer.buffer.sample(5, "train", 3)
    assert queue.list("train") == before
    assert rows == {key: to_rows(queue.get([key], "train")) for key in rows}

    batch, metrics = trainer.buffer.sample(5, "train", 3)
    assert {*batch.extra_info["rollout_root_keys"]} == {"fine", "new-2-0", "new-2-1"}
    assert sorted(trainer.told) == ["a", "b"], "each is told once"
    assert sum(value for name, value in metrics.items() if name.endswith("evicted_samples")) == 2
    assert metrics["training/rollout_failure/refilled_samples"] == 2 * (kind == "incomplete")


# -- age ---------------------------------------------------------------------------------------


def test_stale_groups_are_dropped_counted_and_replaced(make_trainer, rollouts, queue):
    stale = {"max_off_policy_threshold": 2, "max_off_policy_strategy": "drop"}
    trainer = make_trainer(**stale)
    trainer.ends = [{"step": 5, "scores": MIXED}]
    for step in (3, 4, 5):
        rollouts.counted(f"u{step}", step=step, scores=MIXED)
    rollouts.counted("stale and incomplete", step=1, error="boom")
    assert trainer.buffer.get_sampleable_count(5, "train") == 2
    batch, metrics = trainer.buffer.sample(5, "train", 3)
    assert batch.extra_info["rollout_root_keys"][:2] == ["u4", "u5"]
    prefix = "training/off_policy/evicted_samples"
    names = [prefix, *(f"{prefix}_staleness/{name}" for name in ("mean", "max", "min"))]
    assert [metrics[name] for name in names] == [2, 4, 5, 3]
    assert {*trainer.told} == {"u3", "stale and incomplete"}
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


@pytest.mark.parametrize(
    ("strategy", "partition", "scores"),
    [("drop", "val", SAME), ("wait", "val", SAME), ("none", "train", MIXED)],
)
def test_age_and_scores_matter_to_training_only(make_trainer, queue, strategy, partition, scores):
    trainer = make_trainer(max_off_policy_threshold=1, max_off_policy_strategy=strategy)
    rollouts = Rollouts(queue, partition)
    rollouts.counted("a", step=1, scores=scores)
    rollouts.tag("in flight", prompt_tag(1, 1))
    batch, metrics = trainer.buffer.sample(9, partition, 1)
    assert batch.keys == ["a_0_0", "a_1_0"]
    assert not any(metrics.values())


# -- groups without variance in a metric are rejected, counted and replaced ---------------------


def test_a_group_of_equal_scores_is_replaced(trainer, rollouts, queue):
    rollouts.counted("a", scores=SAME)
    rollouts.counted("b", scores=MIXED)
    trainer.ends = [{"scores": (0.0, 0.0)}, {"scores": MIXED}]
    assert trainer.buffer.get_sampleable_count(1, "train") == 1
    assert "a" in queue.list("train"), "counting evicts nothing"
    batch, metrics = trainer.buffer.sample(1, "train", 2)
    assert {key.split("_")[0] for key in batch.keys} == {"b", "new-2-0"}
    assert metrics["training/filter_groups/evicted_samples"] == len(trainer.asked) == 2
    assert "a" not in queue.list("train")
    assert len(trainer.read) == len({*trainer.read}) == 8, "each row is read once"
    for uid, scores in (("c", SAME), ("d", MIXED)):
        rollouts.counted(uid, scores=scores)
    trainer.ends = [{"scores": SAME}]  # without end, at once: without them d is enough
    assert trainer.buffer.sample(1, "train", 1)[0].keys == ["d_0_0", "d_1_0"]


@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("scores", [2, 1])
def test_a_metric_that_is_no_number_is_rejected_by_name(trainer, rollouts, odd, scores, caplog):
    rollouts.counted("a", n=scores, scores=(odd, 1.0)[:scores])
    rollouts.counted("b", scores=MIXED)
    batch, metrics = trainer.buffer.sample(1, "train", 2)
    assert not [key for key in batch.keys if key.startswith("a_")]
    assert metrics["training/filter_groups/evicted_samples"] == 1
    assert "prompt a is rejected" in caplog.text
    rollouts.counted("c", scores=SAME)
    rollouts.tag("runs", prompt_tag(1, 2))
    with pytest.raises(ReplayTimeoutError, match="'scores' rejected 1 groups"):
        trainer.buffer.sample(1, "train")


@pytest.mark.parametrize(
    "values", [[1.0], [1.0] * 3, None, [[1.0, 2.0]] * 2, torch.ones(2, 2), [10**400] * 2]
)
def test_a_metric_returns_one_number_a_row(rollouts, make_buffer, values):
    rollouts.counted("a")
    buffer = make_buffer(lambda *_: [], {"group_filter": GroupFilter(lambda *_: values)})
    with pytest.raises(RlskipError, match="for 2 rows") as error:
        buffer.sample(1, "train")
    assert error.value.where == "group_filter"
