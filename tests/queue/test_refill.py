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
        return PollingWatch(self, 0.001, 0.01)

    def kv_list(self):
        return {name: self.list(name) for name in list(self._partitions)}


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


class Dataset:
    """Refills prompts from now on; the first call fails as it is told to."""

    def __init__(self, rollouts, fails):
        self.rollouts, self.fails, self.asked = rollouts, fails, 0

    def __call__(self, partition, prompts):
        self.asked += len(prompts)
        fails, self.fails = self.fails, None
        if fails is not None:
            return fails()
        uids = [f"new-{prompt.uid}" for prompt in prompts]
        for uid in uids:
            self.rollouts.counted(uid, step=5)
        return uids

    @staticmethod
    def raises():
        raise StopIteration("the data set is at its end")


FAILS = {
    "raises": Dataset.raises,
    "returns too few": lambda: ["one"],
    "returns one twice": lambda: ["one", "one"],
    "returns no uids": lambda: [None],
    "returns a prompt that is there": lambda: ["fine", "one"],
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
def test_a_refill_that_fails_leaves_the_step_as_it_was(queue, rollouts, clock, kind, how, named):
    replay, write = EVICTED[kind]
    refill, told = Dataset(rollouts, FAILS[how]), []
    buffer = ReplayBuffer(
        queue, {"replay": {"timeout_s": 5, **replay}}, refill=refill, clock=clock,
        on_evict=lambda batch: told.extend(batch.extra_info["rollout_root_keys"]),
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
    assert sorted(told) == ["a", "b"], "each is told once"
    assert sum(value for name, value in metrics.items() if name.endswith("evicted_samples")) == 2
    assert refill.asked == 4


def test_a_callback_of_evictions_that_fails_leaves_the_step_as_it_was(queue, rollouts, clock):
    def fails(batch):
        raise OSError("the disk is full")

    replay = {"replay": {"timeout_s": 5, "on_incomplete": "drop"}}
    rollouts.counted("fine")
    rollouts.counted("u", error="boom")
    before = queue.list("train")
    buffer = ReplayBuffer(queue, replay, on_evict=fails, clock=clock)
    for _ in range(2):
        with pytest.raises(OSError, match="full"):
            buffer.sample(1, "train")
        assert queue.list("train") == before


def test_a_filter_that_raises_evicts_nothing_of_what_else_is_incomplete(queue, rollouts, clock):
    fine = []

    def metric(keys, partition):
        if not fine:
            raise ValueError("no score")
        return range(len(keys))

    refill = Dataset(rollouts, None)
    replay = {"replay": {"timeout_s": 5, "on_incomplete": "refill"}}
    buffer = ReplayBuffer(
        queue, replay, refill=refill, group_filter=GroupFilter(metric), clock=clock
    )
    rollouts.counted("fine", step=5)
    rollouts.counted("u", step=5, error="boom")
    before = queue.list("train")
    with pytest.raises(ValueError, match="no score"):
        buffer.sample(5, "train")
    assert (queue.list("train"), refill.asked) == (before, 0)
    fine.append(True)
    batch, _ = buffer.sample(5, "train")
    assert batch.extra_info["rollout_root_keys"] == ["fine", "new-u"]


def test_refill_without_a_callback_is_refused(queue):
    with pytest.raises(ConfigError) as error:
        ReplayBuffer(queue, {"replay": {"on_incomplete": "refill"}})
    assert error.value.where == "replay.on_incomplete"


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
