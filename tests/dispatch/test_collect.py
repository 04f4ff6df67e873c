"""RolloutDispatcher.collect: prompts in, the rows of complete groups out, nothing left behind."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rlskip.dispatch import BatchError, LocalPool, RolloutDispatcher, timeouts
from rlskip.dispatch.collect import Collector
from rlskip.errors import ConfigError
from rlskip.keys import split_trajectory
from rlskip.queue import (
    IncompleteRolloutError,
    MemoryQueue,
    MissingKeysError,
    ReplayBuffer,
    ReplayTimeoutError,
    TrajectoryQueue,
)

CONFIG = {"dispatch": {"rollout_level": True, "n": 3}, "replay": {"timeout_s": 20}}


async def echo(prompt, sampling, session):
    """Two rows of different lengths that name their session."""
    rows = range(2)
    return [{"responses": torch.full((1 + i,), session.session_id), "turn": i} for i in rows]


@pytest.fixture
def make():
    made = []

    def make(worker=echo, *, queue: TrajectoryQueue | None = None, replay=None, **dispatch):
        config = {
            "dispatch": {**CONFIG["dispatch"], **dispatch},
            "replay": {**CONFIG["replay"], **(replay or {})},
        }
        made.append(RolloutDispatcher(LocalPool(worker, 2), queue, config))
        return made[-1]

    yield make
    for dispatcher in made:
        dispatcher.close()


def test_validation_that_was_submitted_before_is_taken_from_its_partition(make, make_prompts):
    dispatcher = make(val_n=2)
    dispatcher.submit(make_prompts(2), step=1, validate=True)
    rows, _ = dispatcher.collect(step=1, validate=True)
    assert len(rows) == 2 * 2 * 2


def test_complete_groups_come_out_and_the_queue_is_empty(make, make_prompts):
    dispatcher = make()
    for step in (1, 2):
        rows, metrics = dispatcher.collect(make_prompts(4), step=step)
        assert rows.batch_size == (4 * 3 * 2,)
        assert list(rows["uid"]) == [f"u_{i}" for i in range(4) for _ in range(6)]
        assert rows["session_id"].tolist() == [0, 0, 1, 1, 2, 2] * 4
        assert [row.tolist() for row in rows["responses"].unbind()] == [
            [s] * (1 + i) for _ in range(4) for s in range(3) for i in range(2)
        ]
        assert not any(metrics.values())
        assert dispatcher.queue.list("train") == {}


def test_columns_of_the_rows_are_kept(make, make_prompts):
    async def worker(prompt, sampling, session):
        return {"uid": "mine", "session_id": torch.tensor(7)}

    rows, _ = make(worker).collect(make_prompts(1), step=1)
    assert list(rows["uid"]) == ["mine"] * 3
    assert rows["session_id"].tolist() == [7] * 3


def test_the_replay_node_of_the_same_config_counts(make, make_prompts):
    async def worker(prompt, sampling, session):
        if session.uid == "u_1":
            raise ValueError("bad prompt")
        return await echo(prompt, sampling, session)

    dispatcher = make(worker, replay={"on_incomplete": "drop"})
    rows, metrics = dispatcher.collect(make_prompts(3), step=1)
    assert set(rows["uid"]) == {"u_0", "u_2"}
    assert sum(metrics.values()) == 1
    assert dispatcher.queue.list("train") == {}


def test_from_config_reads_both_nodes(make_prompts):
    config = {**CONFIG, "replay": {"on_incomplete": "drop"}}
    with RolloutDispatcher.from_config(config, echo) as dispatcher:
        assert dispatcher.buffer.config.on_incomplete == "drop"
        assert len(dispatcher.collect(make_prompts(2), step=1)[0]) == 12


def test_a_trainer_that_generates_ahead_takes_the_oldest_groups(make, make_prompts):
    gate = threading.Event()

    async def worker(prompt, sampling, session):
        while session.step == 2 and not gate.is_set():
            await asyncio.sleep(0.01)
        return {"step": torch.tensor(session.step)}

    def prompts(step):
        return [{"uid": f"{step}-{i}", "input_ids": torch.ones(2)} for i in range(2)]

    dispatcher = make(worker)
    dispatcher.submit(prompts(1), step=1)
    rows, _ = dispatcher.collect(prompts(2), step=2, batch_size=2)  # does not wait for step 2
    assert rows["step"].tolist() == [1] * 6
    gate.set()
    rows, _ = dispatcher.collect(step=3, batch_size=2)
    assert rows["step"].tolist() == [2] * 6
    assert dispatcher.queue.list("train") == {}


def test_prompts_of_one_uid_are_not_collected_by_two_at_once(make, make_prompts):
    begun, others_tried = threading.Event(), threading.Event()

    async def worker(prompt, sampling, session):
        begun.set()
        await asyncio.to_thread(others_tried.wait, 20)
        return await echo(prompt, sampling, session)

    dispatcher = make(worker)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(dispatcher.collect, make_prompts(2), step=1)
        assert begun.wait(20)
        for more in ({}, {"step": 2}, {"batch_size": 1}):
            with pytest.raises(BatchError, match="'u_0'"):
                dispatcher.collect(make_prompts(1), **{"step": 1, **more})
        dispatcher.submit(make_prompts(1), step=1, partition="other")
        others_tried.set()
        assert len(first.result(20)[0]) == 12
    assert len(dispatcher.collect(make_prompts(1), step=1)[0]) == 6


@pytest.mark.parametrize("leaves", ["taken", "evicted", "deleted"])
def test_a_uid_is_free_once_its_group_has_left_the_queue(make, make_prompts, leaves):
    dispatcher, later = make(), {"step": 2, "batch_size": 1}
    dispatcher.submit(make_prompts(2), step=1).result()
    with pytest.raises(BatchError, match="'u_0'"):  # a group of two policies otherwise
        dispatcher.collect(make_prompts(1), **later)
    if leaves == "taken":
        dispatcher.collect(step=1, batch_size=1)
    elif leaves == "evicted":
        dispatcher.buffer.evict(["u_0"], "train")
    else:
        mine = [key for key in dispatcher.queue.list("train") if key.startswith("u_0")]
        dispatcher.queue.delete(mine, "train")
    with pytest.raises(BatchError, match="'u_1'"):
        dispatcher.collect(make_prompts(2), **later)
    dispatcher.submit(make_prompts(1), step=2).result(20)
    assert set(dispatcher.collect(step=2, batch_size=2)[0]["uid"]) == {"u_0", "u_1"}


def test_prompts_that_are_evicted_meanwhile_are_missed_by_name(make, make_prompts):
    async def worker(prompt, sampling, session):
        if session.uid == "u_1":
            await asyncio.to_thread(dispatcher.buffer.evict, ["u_0"], "train")
        return await echo(prompt, sampling, session)

    dispatcher = make(worker, replay={"timeout_s": 0.5})
    with pytest.raises(ReplayTimeoutError, match="deleted: u_0") as error:
        dispatcher.collect(make_prompts(3), step=1)
    assert [prompt.uid for prompt in error.value.prompts] == ["u_0"]
    assert dispatcher.queue.list("train") == {}


def test_an_error_leaves_nothing_of_what_was_refilled(make, make_prompts):
    """Whether the refills have finished or still run."""
    begun, release = threading.Event(), threading.Event()

    async def worker(prompt, sampling, session):
        if session.uid == "slow":
            begun.set()
            await asyncio.to_thread(release.wait, 20)
            return await echo(prompt, sampling, session)
        raise ValueError("bad prompt")

    dispatcher = make(worker, max_data_retries=0)

    def refill(partition, evicted):
        uids = ["slow" if prompt.uid == "u_0" else "bad" for prompt in evicted]
        dispatcher.submit([{"uid": uid} for uid in uids], step=1)
        assert begun.wait(20)
        return uids

    replay = {"replay": {"on_incomplete": "refill", "max_refills": 1, "timeout_s": 20}}
    dispatcher.buffer = ReplayBuffer(dispatcher.queue, replay, refill=refill)
    with pytest.raises(IncompleteRolloutError, match="after 1 refills"):
        dispatcher.collect(make_prompts(2), step=1)
    left = dispatcher.queue.list("train")
    release.set()
    dispatcher.close()
    assert (left, dispatcher.queue.list("train")) == ({}, {})


@pytest.mark.parametrize("during", ["sample", "sampled", "get"])
def test_an_interrupted_call_takes_nothing_from_the_next(make, monkeypatch, during):
    """Ctrl-C while a call samples or reads: the groups are there for the next call."""
    release, waiting = threading.Event(), timeouts.result_of

    async def worker(prompt, sampling, session):
        await asyncio.to_thread(release.wait, 20)
        return await echo(prompt, sampling, session)

    def interrupted(outcome, seconds, call):
        if getattr(call, "__name__", "") == during.removesuffix("d"):
            monkeypatch.setattr(timeouts, "result_of", waiting)
            if during == "sampled":
                waiting(outcome, seconds, call)
            raise KeyboardInterrupt
        return waiting(outcome, seconds, call)

    dispatcher = make(worker)
    if during != "sample":
        release.set()
    monkeypatch.setattr(timeouts, "result_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dispatcher.collect([{"uid": "a"}, {"uid": "b"}], step=1, batch_size=2)
    release.set()
    assert set(dispatcher.collect(step=1, batch_size=2)[0]["uid"]) == {"a", "b"}
    assert dispatcher.queue.list("train") == {}


def test_an_interrupted_call_evicts_and_refills_nothing_more(make, monkeypatch):
    release, waiting = threading.Event(), timeouts.result_of

    async def worker(prompt, sampling, session):
        await asyncio.to_thread(release.wait, 20)
        if session.uid == "bad":
            raise ValueError("bad prompt")
        return await echo(prompt, sampling, session)

    def interrupted(outcome, seconds, call):
        monkeypatch.setattr(timeouts, "result_of", waiting)
        raise KeyboardInterrupt

    def refill(partition, evicted):
        dispatcher.submit([{"uid": "good"}], step=1)
        return ["good"]

    dispatcher = make(worker, max_data_retries=0)
    replay = {"replay": {"on_incomplete": "refill", "timeout_s": 20}}
    dispatcher.buffer = ReplayBuffer(dispatcher.queue, replay, refill=refill)
    batch = dispatcher.submit([{"uid": "bad"}], step=1)
    take = Collector(dispatcher.buffer, dispatcher._uids, 20).take
    monkeypatch.setattr(timeouts, "result_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        take(1, "train", 1)
    release.set()
    batch.result(20)
    for thread in threading.enumerate():
        if thread.name == "rlskip-bounded":
            thread.join(20)
    assert take(1, "train", 1)[1]["training/rollout_failure/refilled_samples"] == 1


@pytest.mark.parametrize("batch_size", [None, 1])
def test_groups_that_cannot_be_read_are_deleted(make, make_prompts, batch_size):
    async def worker(prompt, sampling, session):
        return {f"of session {session.session_id}": 1}

    dispatcher = make(worker)
    with pytest.raises(MissingKeysError):
        dispatcher.collect(make_prompts(1), step=1, batch_size=batch_size)
    assert dispatcher.queue.list("train") == {}


class Full(MemoryQueue):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def put(self, keys, *args, **more):  # type: ignore[no-untyped-def]
        if any(self.what in key for key in keys):
            raise RuntimeError("no space")
        return super().put(keys, *args, **more)


@pytest.mark.parametrize(("what", "batch_size"), [("_sess", None), ("u_", None), ("u_", 1)])
def test_what_kept_a_batch_from_the_queue_is_raised(make, make_prompts, what, batch_size):
    dispatcher = make(queue=Full(what))
    with pytest.raises(RuntimeError, match="no space"):
        dispatcher.collect(make_prompts(2), step=1, batch_size=batch_size)


def test_what_kept_an_earlier_batch_from_the_queue_is_raised(make, make_prompts):
    dispatcher = make(queue=Full("_sess"), replay={"timeout_s": 0.5})
    with pytest.raises(ReplayTimeoutError):
        dispatcher.collect(make_prompts(2), step=1, batch_size=1)
    with pytest.raises(RuntimeError, match="no space"):
        dispatcher.collect(step=2, batch_size=1)


def test_a_buffer_that_refills_can_be_assigned(make, make_prompts):
    tries = []

    async def worker(prompt, sampling, session):
        tries.append(session.uid)
        if session.uid == "u_0" and tries.count("u_0") <= 3:
            raise ValueError("bad prompt")
        return await echo(prompt, sampling, session)

    dispatcher = make(worker, max_data_retries=0)

    def refill(partition, evicted):
        prompts = [{"uid": e.uid, "input_ids": torch.ones(2)} for e in evicted]
        dispatcher.submit(prompts, step=1, partition=partition)

    replay = {"replay": {"on_incomplete": "refill", "timeout_s": 20}}
    dispatcher.buffer = ReplayBuffer(dispatcher.queue, replay, refill=refill)
    rows, _ = dispatcher.collect(make_prompts(2), step=1)
    assert len(rows) == 12
    assert not any(map(split_trajectory, dispatcher.queue.list("train")))


def test_a_call_that_lacks_a_refill_leaves_its_uids_free(make, make_prompts):
    replay = {"on_incomplete": "refill"}
    dispatcher = make(replay=replay)
    with pytest.raises(ConfigError, match="uses dispatcher") as kept:
        dispatcher.collect(make_prompts(2), step=1)
    dispatcher.buffer = ReplayBuffer(dispatcher.queue, {"replay": replay}, refill=lambda *_: None)
    assert len(dispatcher.collect(make_prompts(2), step=1)[0]) == 12
    assert kept.tb, "as that of the last error in a notebook, whose frames hold the batch"


@pytest.mark.parametrize(("step", "why"), [(None, "no step"), ("3", "expected a whole number")])
def test_without_prompts_a_step_is_required(make, step, why):
    with pytest.raises(BatchError, match=why):
        make().collect(step=step)


def test_it_waits_for_sessions_as_long_as_the_buffer_does(make, make_prompts, monkeypatch):
    async def worker(prompt, sampling, session):
        await asyncio.sleep(0.5)
        return await echo(prompt, sampling, session)

    monkeypatch.setattr(timeouts, "write_seconds", lambda config: 0.2)
    rows, _ = make(worker).collect(make_prompts(1), step=1, batch_size=1)
    assert len(rows) == 6


def test_a_partition_of_ones_own(make, make_prompts):
    seen = set()

    async def worker(prompt, sampling, session):
        seen.add(session.partition)
        return await echo(prompt, sampling, session)

    rows, _ = make(worker).collect(make_prompts(2), step=1, partition="other")
    assert (len(rows), seen) == (12, {"other"})


def test_from_config_makes_as_many_threads_as_sessions_may_run(make_prompts):
    together = threading.Barrier(20)

    def worker(prompt, sampling, session):
        together.wait(30)
        return {"responses": torch.ones(3)}

    dispatch = {"rollout_level": True, "n": 20, "workers": 1}
    dispatch["max_concurrent_rollouts_per_worker"] = 20
    with RolloutDispatcher.from_config({"dispatch": dispatch}, worker) as dispatcher:
        assert dispatcher.submit(make_prompts(1), step=1).result().succeeded == 20
