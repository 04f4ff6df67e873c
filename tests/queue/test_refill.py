"""Incomplete groups are replaced: replay.on_incomplete=refill."""

import pytest

from rlskip.errors import ConfigError, RlskipError
from rlskip.keys import prompt_tag, split_trajectory
from rlskip.queue import (
    GroupFilter,
    IncompleteRolloutError,
    MemoryQueue,
    ReplayBuffer,
    ReplayTimeoutError,
    to_rows,
)
from rlskip.queue.transfer_queue import PollingWatch


def test_refill_runs_the_prompt_again_under_its_uid(make_buffer, rollouts, queue):
    evicted = []

    def refill(partition, prompts):
        evicted.append((partition, [prompt.uid for prompt in prompts], list(queue.list("train"))))
        for prompt in prompts:
            rollouts.counted(prompt.uid, error="again" if len(evicted) < 2 else None)

    buffer = make_buffer(refill, on_incomplete="refill")
    rollouts.counted("u", error="boom")
    batch, metrics = buffer.sample(1, "train")
    assert batch.keys == ["u_0_0", "u_1_0"]
    assert evicted == [("train", ["u"], [])] * 2  # evicted before it is refilled
    assert metrics["training/rollout_failure/refilled_samples"] == 2
    assert metrics["training/rollout_failure/evicted_samples"] == 2


class PolledQueue(MemoryQueue):
    """Watched as TransferQueue is, by polling."""

    def watch(self):
        return PollingWatch(lambda: {name: self.list(name) for name in list(self._partitions)})


def test_a_refill_with_equal_tags_is_seen_by_a_watch_that_polls(make_rollouts):
    queue = PolledQueue()
    rollouts = make_rollouts(queue=queue)

    def refill(partition, prompts):
        rollouts.counted("u", 2)  # deleted and put again between two listings

    config = {"replay": {"on_incomplete": "refill", "timeout_s": 2}}
    rollouts.tag("u", prompt_tag(1, 2))
    rollouts.session("u", 0)
    rollouts.session("u", 1, error="oops")
    batch, _ = ReplayBuffer(queue, config, refill=refill).sample(1, "train")
    assert batch.keys == ["u_0_0", "u_1_0"]


def test_refill_gives_up_after_max_refills_in_a_row(make_buffer, rollouts):
    fresh = iter(f"fresh{i}" for i in range(100))

    def refill(partition, prompts):
        uids = [next(fresh) for _ in prompts]
        for uid in uids:
            rollouts.counted(uid, error="always")
        return uids

    buffer = make_buffer(refill, on_incomplete="refill", max_refills=3)
    rollouts.counted("complete")
    rollouts.counted("u", error="boom")
    with pytest.raises(IncompleteRolloutError) as error:
        buffer.sample(1, "train")
    assert "after 3 refills" in error.value.what
    assert [prompt.uid for prompt in error.value.prompts] == ["fresh2"]


def test_a_step_waits_for_refills_that_have_not_arrived(make_buffer, make_rollouts, clock):
    buffer = make_buffer(lambda partition, prompts: ["later"], on_incomplete="refill")
    rollouts, validation = make_rollouts("train"), make_rollouts("val")
    rollouts.counted("complete")
    rollouts.counted("u", error="boom")
    with pytest.raises(ReplayTimeoutError, match="not submitted at this step, or deleted: later"):
        buffer.sample(1, "train")
    validation.counted("v")
    assert buffer.sample(1, "val")[0].extra_info["rollout_root_keys"] == ["v"]  # not delayed
    clock.at(0, lambda: rollouts.counted("later"))
    assert buffer.sample(1, "train")[0].extra_info["rollout_root_keys"] == ["complete", "later"]


@pytest.mark.parametrize("named", [False, True])
def test_a_refill_of_another_step_leaves_no_short_step(make_buffer, rollouts, named):
    def refill(partition, prompts):
        rollouts.counted("late", step=2)
        return ["late"]

    buffer = make_buffer(refill, on_incomplete="refill")
    rollouts.counted("complete")
    rollouts.counted("u", error="boom")
    uids = {"complete", "u"} if named else None
    for _ in range(2):
        with pytest.raises(
            ReplayTimeoutError, match="not submitted at this step, or deleted: late"
        ):
            buffer.sample(1, "train", uids=uids)
    rollouts.tag("late", {"global_steps": 1})
    batch, _ = buffer.sample(1, "train", uids=uids)
    assert batch.extra_info["rollout_root_keys"] == ["complete", "late"]


class Trainer:
    """Refills prompts, filters, and is told of evictions; one of them fails once."""

    def __init__(self, rollouts, fails):
        self.rollouts, self.fails, self.told = rollouts, dict([fails]), []

    def refill(self, partition, prompts):
        if "refill" in self.fails:
            return self.fails.pop("refill")()
        uids = [f"new-{prompt.uid}" for prompt in prompts]
        for uid in uids:
            self.rollouts.counted(uid, step=5)
        return uids

    def metric(self, keys, partition):
        return self.fails.pop("metric", lambda: range(len(keys)))()

    def on_evict(self, batch):
        self.fails.pop("on_evict", int)()
        self.told += batch.extra_info["rollout_root_keys"]


def end_of_data():
    raise StopIteration("the data set is at its end")


FAILS = {
    "the refill raises": ("refill", end_of_data),
    "it returns too few": ("refill", lambda: ["one"]),
    "it returns one twice": ("refill", lambda: ["one", "one"]),
    "it returns no uids": ("refill", lambda: [None]),
    "it returns a prompt that is there": ("refill", lambda: ["fine", "one"]),
    "the filter raises": ("metric", end_of_data),
    "who is told raises": ("on_evict", end_of_data),
}
EVICTED = {
    "incomplete": ({"on_incomplete": "refill"}, lambda r, u: r.counted(u, step=5, error="boom")),
    "stale": (
        {"max_off_policy_threshold": 1, "max_off_policy_strategy": "drop"},
        lambda r, u: r.counted(u, step=1),
    ),
}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("how", FAILS)
@pytest.mark.parametrize("kind", EVICTED)
def test_what_raises_leaves_the_step_as_it_was(queue, rollouts, clock, kind, how, named):
    replay, write = EVICTED[kind]
    trainer = Trainer(rollouts, FAILS[how])
    buffer = ReplayBuffer(
        queue, {"replay": {"timeout_s": 5, **replay}}, refill=trainer.refill,
        on_evict=trainer.on_evict, group_filter=GroupFilter(trainer.metric),
    )  # fmt: skip
    rollouts.counted("fine", step=5)
    for uid in ("a", "b"):
        write(rollouts, uid)
    queue.put(["a_0_0"], "train", [{"only here": 1}])  # its rows hold different fields
    uids = {"fine", "a", "b"} if named else None
    before = queue.list("train")
    rows = {key: to_rows(queue.get([key], "train")) for key in before if split_trajectory(key)}
    with pytest.raises((RlskipError, StopIteration)):
        buffer.sample(5, "train", 3, uids)
    assert queue.list("train") == before
    assert rows == {key: to_rows(queue.get([key], "train")) for key in rows}
    assert uids in (None, {"fine", "a", "b"})

    batch, metrics = buffer.sample(5, "train", 3, uids)
    assert {*batch.extra_info["rollout_root_keys"]} == {"fine", "new-a", "new-b"}
    assert sorted(trainer.told) == ["a", "b"], "each is told once"
    assert sum(value for name, value in metrics.items() if name.endswith("evicted_samples")) == 2


@pytest.mark.parametrize(
    ("on_incomplete", "group_filter", "where"),
    [
        ("refill", None, "replay.on_incomplete"),
        ("raise", GroupFilter(lambda keys, partition: [0.0] * len(keys)), "group_filter"),
    ],
)
def test_what_refills_needs_a_callback(queue, on_incomplete, group_filter, where):
    replay = {"replay": {"on_incomplete": on_incomplete}}
    with pytest.raises(ConfigError) as error:
        ReplayBuffer(queue, replay, group_filter=group_filter)
    assert error.value.where == where


@pytest.mark.parametrize("batch_size", [None, 2])
def test_validation_is_dropped_and_never_refilled(make_buffer, make_rollouts, batch_size, queue):
    refilled = []
    buffer = make_buffer(lambda *args: refilled.append(args), on_incomplete="refill")
    rollouts = make_rollouts("val")
    rollouts.counted("complete")
    rollouts.counted("u", error="boom")
    batch, metrics = buffer.sample(1, "val", batch_size)
    assert batch.extra_info["rollout_root_keys"] == ["complete"]
    assert metrics["validation/rollout_failure/evicted_samples"] == 1
    assert metrics["validation/rollout_failure/refilled_samples"] == 0
    assert not refilled
    assert "u" not in queue.list("val")
