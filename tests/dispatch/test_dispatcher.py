from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections import Counter

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from rlskip.dispatch import (
    BatchError,
    DataFailure,
    DispatcherClosedError,
    InfrastructureFailure,
    LocalPool,
)
from rlskip.dispatch import RolloutDispatcher as Dispatcher
from rlskip.errors import ConfigError
from rlskip.keys import split_session, split_trajectory
from rlskip.queue import MemoryQueue
from rlskip.replay import IncompleteRolloutError, ReplayBuffer
from rlskip.store import StepStore


async def echo(prompt, sampling, session):
    """Two rows that say which session they are of."""
    seed = torch.tensor([session.seed % 1000, session.session_id])
    return [{"responses": seed}, {"responses": torch.cat([seed, prompt["input_ids"]])}]


def markers(log):
    return [(key, tag) for key, tag in log if split_session(key)]


@pytest.mark.parametrize("policy", ["chunk", "round_robin", "least_loaded", "longest_first"])
def test_root_then_rows_then_exactly_one_marker(make_dispatcher, make_prompts, queue, policy):
    dispatcher = make_dispatcher(echo, policy=policy, max_concurrent_rollouts_per_worker=2)
    report = dispatcher.generate_sequences(make_prompts(6), step=3)
    assert (report.prompts, report.sessions, report.succeeded) == (6, 24, 24)
    assert report.failed == {}
    assert report.tokens == 24 * (2 + 10)

    keys = [key for key, _ in queue.log]
    assert len(keys) == len(set(keys)) == 6 + 24 * 2 + 24
    place = {key: i for i, key in enumerate(keys)}
    for uid in (f"u_{i}" for i in range(6)):
        for session in range(4):
            rows = [place[f"{uid}_{session}_{index}"] for index in (0, 1)]
            assert place[uid] < min(rows)
            assert max(rows) < place[f"{uid}_sess{session}"]
    roots = [tag for key, tag in queue.log if not split_session(key) and not split_trajectory(key)]
    root = {"is_prompt": True, "global_steps": 3, "n": 4, "expected_rollouts": 4}
    assert roots == [root] * 6


def test_the_replay_buffer_takes_the_groups(make_dispatcher, make_prompts, queue):
    dispatcher = make_dispatcher(echo)
    buffer = ReplayBuffer(queue)
    dispatcher.submit(make_prompts(5), step=1)
    batch, _ = buffer.sample(1, "train")
    assert len(batch) == 5 * 4 * 2
    assert sorted(batch.extra_info["rollout_root_keys"]) == [f"u_{i}" for i in range(5)]


def test_the_legacy_path_speaks_in_statuses(make_dispatcher, make_prompts, queue):
    workers = {}

    class Worker:
        async def __call__(self, prompt, sampling, session):
            workers.setdefault(session.uid, set()).add(id(self))
            if session.uid == "u_1" and session.session_id == 2:
                raise ValueError("no")
            return await echo(prompt, sampling, session)

    dispatcher = make_dispatcher(Worker, rollout_level=False, policy="round_robin")
    dispatcher.generate_sequences(make_prompts(4), step=1)
    statuses = [(k, t["status"]) for k, t in queue.log if k.startswith("u_") and k[2:].isdigit()]
    for uid in ("u_0", "u_1", "u_2", "u_3"):
        said = [status for key, status in statuses if key == uid]
        assert said == ["pending", "running", "failure" if uid == "u_1" else "finished"]
    tags = queue.list("train")
    assert tags["u_0"]["expected_rollouts"] == 4
    assert "n" not in tags["u_0"]
    assert tags["u_1"]["error"] == "session 2: data: ValueError: no"
    assert len(workers["u_0"]) == 1  # a prompt's sessions stay on one worker


def test_each_prompt_has_its_own_n_and_sampling(make_dispatcher, make_prompts, queue):
    seen = {}

    async def worker(prompt, sampling, session):
        seen[session.uid, session.session_id] = sampling
        assert "__rollout_n__" not in prompt
        return {"responses": torch.ones(1)}

    prompts = make_prompts(
        3,
        __rollout_n__=torch.tensor([1, 2, 3]),
        __do_sample__=NonTensorStack(True, False, True),
    )
    usual, val = {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.1}
    dispatcher = make_dispatcher(worker, sampling=usual, val_sampling=val, val_n=2)
    report = dispatcher.generate_sequences(prompts, step=1)
    assert report.sessions == 6
    assert queue.list("train")["u_2"]["n"] == 3
    assert seen["u_0", 0] == usual
    assert seen["u_1", 1] == {"temperature": 0, "top_p": 1.0, "top_k": -1}

    seen.clear()
    dispatcher.generate_sequences(make_prompts(2), step=1, validate=True)
    assert queue.list("val")["u_0"]["n"] == 2
    assert list(seen.values()) == [val] * 4


def test_an_infrastructure_failure_is_retried_elsewhere(make_dispatcher, make_prompts, queue):
    runs, numbers = [], iter(range(9))

    class Worker:
        def __init__(self):
            self.number = next(numbers)

        async def __call__(self, prompt, sampling, session):
            runs.append((session.session_id, session.attempt, self.number))
            if session.session_id == 1 and session.attempt < 2:
                raise ConnectionError("engine is gone")
            return await echo(prompt, sampling, session)

    report = make_dispatcher(Worker, max_retries=2).generate_sequences(make_prompts(1), step=1)
    assert report.failed == {}
    assert report.attempts == 6
    places = [number for session, _, number in sorted(runs) if session == 1]
    assert places[0] != places[1] != places[2]
    assert queue.list("train")["u_0_sess1"]["attempt"] == 2
    assert queue.list("train")["u_0_1_0"]["attempt"] == 2
    assert len(markers(queue.log)) == 4


@pytest.mark.parametrize(
    ("error", "kind", "attempts"),
    [
        (ValueError("bad prompt"), "data", 2),
        (DataFailure("bad prompt"), "data", 2),
        (OSError("no route"), "infrastructure", 4),
        (InfrastructureFailure("no route"), "infrastructure", 4),
    ],
)
def test_failures_are_told_apart_and_bounded(
    make_dispatcher, make_prompts, queue, error, kind, attempts
):
    async def worker(prompt, sampling, session):
        raise error

    dispatcher = make_dispatcher(worker, n=1, max_retries=3, max_data_retries=1)
    report = dispatcher.generate_sequences(make_prompts(1), step=1)
    assert report.attempts == attempts
    ((_, tag),) = markers(queue.log)
    assert tag["status"] == "failure"
    assert tag["error"].startswith(f"{kind}: ")
    assert str(error).split()[0] in tag["error"]
    assert report.failed == {("u_0", 0): tag["error"]}


@pytest.mark.parametrize("result", [[], 3, ["text"]])
def test_a_worker_that_returns_no_rows_failed(make_dispatcher, make_prompts, result):
    async def worker(prompt, sampling, session):
        return result

    report = make_dispatcher(worker, n=1).generate_sequences(make_prompts(1), step=1)
    assert "data: the worker returned" in report.failed["u_0", 0]


def test_a_deadline_ends_an_attempt_and_its_late_result_is_dropped(
    make_dispatcher, make_prompts, queue
):
    release = threading.Event()

    def worker(prompt, sampling, session):  # a thread cannot be stopped
        if session.attempt == 0 and session.session_id == 0:
            release.wait(20)
        return {"responses": torch.full((2,), session.attempt)}

    dispatcher = make_dispatcher(worker, n=2, session_timeout_s=0.3)
    late_ones = make_prompts(1)
    batch = dispatcher.submit(late_ones, step=1)
    report = batch.result(20)
    assert report.failed == {}
    assert report.attempts == 3
    release.set()
    deadline = time.monotonic() + 10
    while batch.report().late == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert batch.report().late == 1
    assert len(markers(queue.log)) == 2
    row = queue.get(["u_0_0_0"], "train")["responses"]
    assert row[0].tolist() == [1, 1]  # the second attempt's, once


def test_a_session_that_hangs_is_marked_with_its_deadline(make_dispatcher, make_prompts):
    async def worker(prompt, sampling, session):
        await asyncio.Event().wait()

    dispatcher = make_dispatcher(worker, n=1, session_timeout_s=0.05, max_retries=1)
    report = dispatcher.generate_sequences(make_prompts(1), step=1)
    assert report.attempts == 2
    assert "dispatch.session_timeout_s" in report.failed["u_0", 0]


def test_a_deadline_runs_from_the_sessions_own_start(make_dispatcher, make_prompts):
    began = {}

    async def worker(prompt, sampling, session):
        began[session.session_id] = time.monotonic()
        if session.session_id > 0:
            await asyncio.Event().wait()
        await asyncio.sleep(0.2)  # and ends, so that its deadline is nobody's
        return {"responses": torch.zeros(2)}

    options = {"max_concurrent_rollouts": 1, "session_timeout_s": 0.3, "max_retries": 0}
    dispatcher = make_dispatcher(worker, n=3, policy="round_robin", **options)
    report = dispatcher.generate_sequences(make_prompts(1), step=1)
    ended = time.monotonic()
    assert set(report.failed) == {("u_0", 1), ("u_0", 2)}
    assert began[2] - began[1] >= 0.29
    assert ended - began[2] >= 0.29


def test_a_pool_that_cannot_stop_a_session_keeps_no_other_waiting(make_prompts, queue):
    class Stubborn(LocalPool):
        def stop(self, worker, future):
            raise RuntimeError("no")

    async def worker(prompt, sampling, session):
        await asyncio.Event().wait()

    settings = {"rollout_level": True, "n": 2, "session_timeout_s": 0.1, "max_retries": 0}
    with Dispatcher(Stubborn(worker, 2), queue, {"dispatch": settings}) as dispatcher:
        report = dispatcher.submit(make_prompts(2), step=1).result(10)
    assert len(report.failed) == len(markers(queue.log)) == 4


def test_cancelling_a_batch_cancels_its_sessions(make_dispatcher, make_prompts, queue):
    cancelled, started = Counter(), threading.Event()

    async def worker(prompt, sampling, session):
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled["sessions"] += 1
            raise

    dispatcher = make_dispatcher(worker, max_concurrent_rollouts=3)
    batch = dispatcher.submit(make_prompts(2), step=1)
    assert started.wait(10)
    batch.cancel()
    report = batch.result(10)
    assert cancelled["sessions"] == 3
    assert set(report.failed.values()) == {"cancelled"}
    assert len(markers(queue.log)) == 8
    # The slots are free again.
    batch = dispatcher.submit(make_prompts(1), step=2)
    batch.cancel()
    assert batch.result(10).sessions == 4


def test_caps_hold(make_dispatcher, make_prompts):
    running, most = Counter(), Counter()

    class Worker:
        async def __call__(self, prompt, sampling, session):
            for key in (id(self), "all"):
                running[key] += 1
                most[key] = max(most[key], running[key])
            await asyncio.sleep(0.002)
            for key in (id(self), "all"):
                running[key] -= 1
            return {"responses": torch.ones(1)}

    caps = {"max_concurrent_rollouts_per_worker": 2, "max_concurrent_rollouts": 5}
    make_dispatcher(Worker, **caps).generate_sequences(make_prompts(8), step=1)
    assert most.pop("all") == 5
    assert max(most.values()) == 2


def test_workers_of_every_kind(make_dispatcher, make_prompts, queue):
    def blocking(prompt, sampling, session):
        return {"responses": torch.ones(3), "thread": threading.current_thread().name}

    class Made:
        def __init__(self, value):
            self.value = value

        def __call__(self, prompt, sampling, session):
            return {"responses": torch.full((self.value,), 1)}

    async def partial(value, prompt, sampling, session):
        return {"responses": torch.ones(value)}

    kinds = [blocking, functools.partial(Made, 3), Made(3), functools.partial(partial, 3)]
    for step, worker in enumerate(kinds):
        report = make_dispatcher(worker, 2).generate_sequences(make_prompts(2), step=step)
        assert (report.succeeded, report.tokens) == (8, 24)


def test_sessions_of_a_prompt_share_nothing(make_dispatcher, make_prompts, queue):
    async def worker(prompt, sampling, session):
        prompt["input_ids"].add_(1)
        prompt["messages"].append(session.session_id)
        sampling["seed"] = session.seed
        return {"responses": prompt["input_ids"], "said": len(prompt["messages"])}

    prompts = make_prompts(2, messages=NonTensorStack(["hi"], ["ho"]))
    dispatcher = make_dispatcher(worker, 1, sampling={"temperature": 1.0})
    assert dispatcher.generate_sequences(prompts, step=1).failed == {}
    rows = queue.get([f"u_0_{i}_0" for i in range(4)], "train")
    assert list(rows["said"]) == [2] * 4
    assert all(row.tolist() == list(range(1, 9)) for row in rows["responses"])
    assert prompts["input_ids"][0].tolist() == list(range(8))


@pytest.mark.parametrize("policy", ["chunk", "least_loaded", "longest_first"])
def test_the_same_rollouts_from_any_number_of_workers(make_prompts, policy):
    def rollouts(workers):
        queue = MemoryQueue()
        config = {"dispatch": {"rollout_level": True, "n": 4, "policy": policy}}
        with Dispatcher(LocalPool(echo, workers), queue, config) as dispatcher:
            dispatcher.generate_sequences(make_prompts(5), step=7)
        keys = sorted(filter(split_trajectory, queue.list("train")))
        rows = queue.get(keys, "train")["responses"].unbind()
        return [(key, row.tolist()) for key, row in zip(keys, rows, strict=True)]

    assert rollouts(1) == rollouts(4)


def test_batches_overlap(make_dispatcher, make_prompts, queue):
    dispatcher = make_dispatcher(echo, max_concurrent_rollouts=4)
    first = dispatcher.submit(make_prompts(8), step=1)
    second = dispatcher.submit(make_prompts(3), step=1, validate=True)
    assert second.result(20).failed == first.result(20).failed == {}
    assert len(queue.list("val")) == 3 + 3 * 2 + 3


def test_a_batch_can_be_awaited(make_dispatcher, make_prompts):
    dispatcher = make_dispatcher(echo)

    async def main():
        return await dispatcher.submit(make_prompts(2), step=1)

    assert asyncio.run(main()).succeeded == 8


def test_history_of_a_prompt_orders_the_next_batch(make_dispatcher, make_prompts):
    order = []

    async def worker(prompt, sampling, session):
        order.append(session.sample_index)
        return {"responses": torch.ones(10 * (session.sample_index + 1))}

    dispatcher = make_dispatcher(
        worker, 1, n=2, policy="longest_first", max_concurrent_rollouts_per_worker=1
    )
    dispatcher.generate_sequences(make_prompts(3), step=1)
    assert order[:3] == [0, 1, 2]  # one probe each
    order.clear()
    dispatcher.generate_sequences(make_prompts(3), step=2)
    assert order == [2, 2, 1, 1, 0, 0]


def test_dumps_of_the_same_prompts_order_the_batch(make_dispatcher, make_prompts, tmp_path):
    order = []

    async def worker(prompt, sampling, session):
        order.append(session.sample_index)
        return {"responses": torch.ones(1)}

    store = StepStore(tmp_path)
    lengths = torch.tensor([2, 7, 4])
    dump = {"index": torch.arange(3), "response_mask": torch.arange(8) < lengths[:, None]}
    store.save(1, TensorDict(dump, batch_size=[3]))
    store.save(2, {"index": torch.arange(3)})  # says no lengths
    dispatcher = make_dispatcher(
        worker,
        1,
        n=2,
        policy="longest_first",
        history_fields=["index"],
        max_concurrent_rollouts_per_worker=1,
        more={"store": store},
    )
    dispatcher.generate_sequences(make_prompts(3, index=torch.arange(3)), step=3)
    assert order == [1, 1, 2, 2, 0, 0]


def test_what_is_no_batch_is_refused(make_dispatcher, make_prompts):
    dispatcher = make_dispatcher(echo)
    prompts = make_prompts(2)
    for bad, what in [
        (prompts.exclude("uid"), "no uids"),
        ([{"uid": "a"}, {"uid": "a"}], "uids given twice: a"),
        ([], "no prompts"),
        ([{"uid": "a", "__rollout_n__": 0}], "0 sessions"),
    ]:
        with pytest.raises(BatchError, match=what):
            dispatcher.submit(bad, step=1)
    with pytest.raises(BatchError, match="no step"):
        dispatcher.submit(prompts)
    assert (
        dispatcher.submit([{"uid": "a", "global_steps": 4, "input_ids": torch.ones(1)}]).step == 4
    )


@pytest.mark.parametrize("rollout_level", [True, False])
def test_rows_that_the_queue_refuses_fail_their_session_alone(
    make_dispatcher, make_prompts, queue, rollout_level
):
    async def worker(prompt, sampling, session):
        odd = {"odd": (value for value in "abc")} if session.session_id == 1 else {}
        return {"responses": torch.ones(3), **odd}

    dispatcher = make_dispatcher(worker, rollout_level=rollout_level)
    report = dispatcher.generate_sequences(make_prompts(3), step=1)
    assert report.failed.keys() == {(f"u_{i}", 1) for i in range(3)}
    assert "data: its rows could not be written: TypeError" in report.failed["u_0", 1]
    final = dict(markers(queue.log))
    assert len(final) == 12
    assert sum(tag["status"] == "failure" for tag in final.values()) == 3
    with pytest.raises(IncompleteRolloutError, match="rows could not be written"):
        ReplayBuffer(queue, {"replay": {"timeout_s": 5}}).sample(1, "train")


class Broken(MemoryQueue):
    """Takes nothing, or no markers."""

    def __init__(self, refuses):
        super().__init__()
        self.refuses = refuses

    def put(self, keys, partition_id, fields=None, tags=None):
        if self.refuses(keys):
            raise RuntimeError("no space")
        return super().put(keys, partition_id, fields, tags)


@pytest.mark.parametrize("refuses", [lambda keys: True, lambda keys: split_session(keys[0])])
def test_a_queue_that_takes_no_markers_fails_the_batch(make_prompts, refuses):
    with Dispatcher(LocalPool(echo, 2), Broken(refuses), {"dispatch": {"n": 2}}) as dispatcher:
        batch = dispatcher.submit(make_prompts(2), step=1)
        with pytest.raises(RuntimeError, match="no space"):
            batch.result(10)


def test_a_policy_that_fails_fails_the_batch_and_marks_every_session(make_prompts, queue):
    def policy(session):
        raise KeyError("oops")

    config = {"dispatch": {"rollout_level": True, "n": 2}}
    with Dispatcher(LocalPool(echo, 2), queue, config, policy=policy) as dispatcher:
        batch = dispatcher.submit(make_prompts(2), step=1)
        with pytest.raises(KeyError, match="oops"):
            batch.result(10)
        with pytest.raises(IncompleteRolloutError, match="oops"):
            ReplayBuffer(queue, {"replay": {"timeout_s": 5}}).sample(1, "train")
    assert len(markers(queue.log)) == 4


@pytest.mark.parametrize("kind", ["async", "blocking"])
def test_a_worker_that_exits_fails_its_session_only(make_dispatcher, make_prompts, kind):
    def blocking(prompt, sampling, session):
        if session.session_id == 1:
            raise SystemExit(2)  # argparse in an environment, say
        return {"responses": torch.ones(3)}

    async def coroutine(*args):
        return blocking(*args)

    dispatcher = make_dispatcher(blocking if kind == "blocking" else coroutine)
    report = dispatcher.generate_sequences(make_prompts(2), step=1)
    assert report.failed.keys() == {("u_0", 1), ("u_1", 1)}
    assert "data: the worker raised SystemExit: 2" in report.failed["u_0", 1]
    assert report.succeeded == 6


def test_a_blocking_worker_gets_no_more_sessions_than_it_has_threads(make_prompts, queue):
    def worker(prompt, sampling, session):
        time.sleep(0.2)
        return {"responses": torch.ones(3)}

    config = {"dispatch": {"rollout_level": True, "n": 4, "session_timeout_s": 0.5}}
    with Dispatcher(LocalPool(worker, 1, threads=1), queue, config) as dispatcher:
        report = dispatcher.generate_sequences(make_prompts(1), step=1)
    # Handed out at once, the third and the fourth would wait past their deadline.
    assert report.failed == {}
    assert report.attempts == 4


def test_a_closed_dispatcher_says_so(make_dispatcher, make_prompts):
    dispatcher = make_dispatcher(echo)
    dispatcher.close()
    with pytest.raises(DispatcherClosedError, match="closed"):
        dispatcher.submit(make_prompts(1), step=1)


def test_a_journal_needs_a_store(queue):
    with pytest.raises(ConfigError, match=r"dispatch\.journal"):
        Dispatcher(LocalPool(echo), queue, {"dispatch": {"journal": True}})
