"""RolloutDispatcher.collect: prompts in, the rows of complete groups out, nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rlskip.dispatch import BatchError, DispatcherClosedError, RolloutDispatcher
from rlskip.dispatch.groups import Groups
from rlskip.errors import ConfigError
from rlskip.queue import MemoryQueue, ReplayTimeoutError, UnequalFieldsError
from rlskip.queue.sampling import SampleCall
from tests.clock import eventually, in_a_fork


async def echo(prompt, sampling, session):
    """Two rows of different lengths that name their session."""
    rows = range(2)
    return [{"responses": torch.full((1 + i,), session.session_id), "turn": i} for i in rows]


@pytest.fixture
def make(make_dispatcher):
    def make(worker=echo, **more):
        return make_dispatcher(worker, 2, **{"queue": None, "n": 3, **more})

    return make


def test_complete_groups_come_out_and_the_queue_is_empty(make, make_prompts):
    dispatcher = make()
    for step in (1, 2):
        rows, metrics = dispatcher.collect(make_prompts(4), step=step)
        assert list(rows["uid"]) == [f"u_{i}" for i in range(4) for _ in range(6)]
        assert rows["session_id"].tolist() == [0, 0, 1, 1, 2, 2] * 4
        assert [row.tolist() for row in rows["responses"].unbind()] == [
            [s] * (1 + i) for _ in range(4) for s in range(3) for i in range(2)
        ]
        assert not any(metrics.values())


def test_columns_of_the_rows_are_kept(make, make_prompts):
    async def worker(prompt, sampling, session):
        its = {"uid": "mine", "session_id": torch.tensor(7)} if session.session_id else {}
        return {"x": 1, **its}

    rows, _ = make(worker, fill_missing=True).collect(make_prompts(1), step=1)
    assert list(rows["uid"]) == ["u_0", "mine", "mine"]
    assert rows["session_id"].tolist() == [0, 7, 7]


def test_a_trainer_that_generates_ahead_takes_the_oldest_groups(make, make_prompts):
    gate = threading.Event()

    async def worker(prompt, sampling, session):
        while session.step == 2 and not gate.is_set():
            await asyncio.sleep(0.01)
        return {"step": torch.tensor(session.step)}

    dispatcher = make(worker, replay={"timeout_s": 2})
    dispatcher.submit(make_prompts(2), step=1)
    rows, _ = dispatcher.collect(make_prompts(2, of="v"), step=2, batch_size=2)  # not of step 2
    assert rows["step"].tolist() == [1] * 6
    with pytest.raises(ReplayTimeoutError):  # they stay for the next call
        dispatcher.collect(step=2, batch_size=2)
    gate.set()
    rows, _ = dispatcher.collect(step=3, batch_size=2)
    assert rows["step"].tolist() == [2] * 6


def test_from_config_makes_as_many_threads_as_sessions_may_run(make_prompts):
    together = threading.Barrier(20)

    def worker(prompt, sampling, session):
        together.wait(30)
        return {"responses": torch.ones(3)}

    dispatch = {"rollout_level": True, "n": 20, "workers": 1}
    dispatch["max_concurrent_rollouts_per_worker"] = 20
    with RolloutDispatcher.from_config({"dispatch": dispatch}, worker) as dispatcher:
        assert dispatcher.submit(make_prompts(1), step=1).result().succeeded == 20


@pytest.mark.parametrize("leaves", ["collected", "taken", "cancelled", "stopped"])
def test_a_uid_is_free_once_its_group_was_taken_or_given_up(make, make_prompts, leaves):
    async def worker(prompt, sampling, session):
        await asyncio.sleep(60 if (leaves, session.step) == ("stopped", 1) else 0)
        if (leaves, session.step, session.session_id) == ("taken", 1, 1):
            raise ValueError("bad prompt")
        return await echo(prompt, sampling, session)

    dispatcher = make(worker, max_data_retries=0)
    batch = dispatcher.submit(make_prompts(2), step=1)
    if leaves != "stopped":
        batch.result(20)
    with pytest.raises(BatchError, match="'u_0'"):
        dispatcher.submit(make_prompts(1), step=2)
    if leaves == "collected":
        assert len(dispatcher.collect(step=1)[0]) == 12
    elif leaves == "taken":
        for i, group in enumerate(batch.groups()):
            assert (group.uid, group.step, group.n) == (f"u_{i}", 1, 3)
            assert group.failed == {1: "data: ValueError: bad prompt"}
            rows = {s: [row["responses"].tolist() for row in its] for s, its in group.rows.items()}
            assert rows == {s: [[s], [s, s]] for s in (0, 2)}
    else:
        batch.cancel()
    assert len(dispatcher.collect(make_prompts(1), step=2)[0]) == 6


def test_rows_are_freed_with_the_last_who_has_them(make, make_prompts):
    """Not later, by the garbage collector: those of a step can fill the memory."""
    batch = make().submit(make_prompts(2), step=1)
    freed = weakref.ref(batch.groups(20)[0])
    gc.disable()
    try:
        del batch
        assert eventually(lambda: freed() is None, 10)
    finally:
        gc.enable()


@pytest.mark.parametrize("odd", [{"score": 1.0}, {"mask": torch.ones(2)}])
@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("queue", [None, MemoryQueue()])
def test_no_field_is_lost(make, make_prompts, odd, fill, queue):
    """A field that one row lacks is an error, or None for other than tensors by `fill_missing`."""

    async def worker(prompt, sampling, session):
        lacks = (session.uid, session.session_id) == ("u_1", 2)
        return {"responses": torch.ones(1), **({} if lacks else odd)}

    dispatcher = make(worker, fill_missing=fill, queue=queue)
    if fill and "score" in odd:
        rows, _ = dispatcher.collect(make_prompts(2), step=1)
        assert list(rows["score"]) == [1.0] * 5 + [None]
        return
    (name,) = odd
    with pytest.raises(UnequalFieldsError, match=f"session 2 of prompt 'u_1'.* lacks '{name}'"):
        dispatcher.collect(make_prompts(2), step=1)
    assert len(make().collect(make_prompts(2), step=1)[0]) == 12, "its uids are free"


def test_collect_has_one_deadline(make, make_prompts):
    """Not one a prompt; the error names what is missing, and nothing runs on."""

    async def worker(prompt, sampling, session):
        await asyncio.sleep(0 if session.uid == "u_0" or session.step == 2 else 60)
        return await echo(prompt, sampling, session)

    dispatcher = make(worker, replay={"timeout_s": 0.5})
    began = time.monotonic()
    with pytest.raises(ReplayTimeoutError) as error:
        dispatcher.collect(make_prompts(4), step=1)
    assert 0.5 <= time.monotonic() - began < 20
    assert {prompt.uid for prompt in error.value.prompts} == {"u_1", "u_2", "u_3"}
    assert eventually(lambda: not dispatcher._groups._scheduler.running)
    dispatcher.submit(make_prompts(4), step=2).result(20)


def test_who_waits_is_told_what_ended_the_batch(make, make_prompts, monkeypatch):
    """Its last session ends just before it does, and who waits looks in between."""
    looked, finish, check_time = threading.Event(), Groups.finish, SampleCall.check_time

    def finish_later(self, *ended):
        looked.clear()
        with self.changed:
            self.changed.notify_all()
        looked.wait(10)
        finish(self, *ended)

    monkeypatch.setattr(Groups, "finish", finish_later)
    monkeypatch.setattr(SampleCall, "check_time", lambda *at: (looked.set(), check_time(*at))[1])
    dispatcher = make(policy="builtins:id")
    with pytest.raises(ConfigError, match="the policy returned a int"):
        dispatcher.collect(make_prompts(2), step=1)


def test_stale_groups_are_dropped_and_counted(make, make_prompts):
    limits = {"max_off_policy_threshold": 2, "max_off_policy_strategy": "drop"}
    dispatcher = make(replay=limits)
    for step in (1, 2, 4):
        dispatcher.submit(make_prompts(2, of=f"{step}"), step=step).result(20)
    rows, metrics = dispatcher.collect(make_prompts(2, of="5"), step=5, batch_size=4)
    assert set(rows["uid"]) == {"4_0", "4_1", "5_0", "5_1"}
    prefix = "training/off_policy/evicted_samples"
    assert (metrics[prefix], metrics[f"{prefix}_staleness/max"]) == (4, 5)


@pytest.mark.parametrize("size", [None, 1])
def test_a_dispatcher_that_is_closed_returns_no_part_of_a_step(make, make_prompts, size):
    begun = threading.Event()

    async def worker(prompt, sampling, session):
        begun.set()
        await asyncio.sleep(0 if (size, session.uid) == (None, "u_0") else 60)
        return await echo(prompt, sampling, session)

    dispatcher = make(worker, replay={"on_incomplete": "drop"})
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(dispatcher.collect, make_prompts(2), step=1, batch_size=size)
        assert begun.wait(20)
        dispatcher.close()
        with pytest.raises(DispatcherClosedError, match="closed while"):
            call.result(20)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_no_dispatcher(make, make_prompts):
    dispatcher = make(n=1)
    dispatcher.collect(make_prompts(1), step=1)

    def refused():
        for call in (dispatcher.collect, dispatcher.submit):
            with pytest.raises(DispatcherClosedError, match="forked"):
                call(make_prompts(1), step=2)
        dispatcher.close()

    in_a_fork(refused)
    assert len(dispatcher.collect(make_prompts(1), step=2)[0]) == 2
