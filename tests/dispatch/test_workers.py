"""Workers of this process: kinds, caps, isolation, determinism."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch

from rlskip.dispatch import LocalPool, sessions
from tests.clock import eventually


@pytest.mark.parametrize(("workers", "threads"), [(1, 1), (2, 1), (1, 2)])
def test_a_call_that_hangs_delays_its_own_step_only_and_its_late_result_is_dropped(
    make_dispatcher, workers, threads, clock, queue
):
    hangs, hang, returns, calls = *(threading.Event() for _ in range(3)), Counter()

    def worker(prompt, sampling, session):
        calls[session.step] += 1
        if session.step == 1 and (session.session_id, session.attempt) == (0, 0):
            hangs.set()
            hang.wait(100)
            returns.set()
        return {"responses": torch.full((2,), session.attempt)}

    dispatcher = make_dispatcher(LocalPool(worker, workers, threads=threads), n=3, max_retries=1)
    batch = dispatcher.submit([{"uid": "1"}], step=1)
    assert hangs.wait(30)
    # Handed out at once, those that wait for its thread would pass their deadlines there.
    ran, report = (2, 3) if workers * threads > 1 else (0, 1), batch.report
    assert eventually(lambda: (report.succeeded, report.attempts) == ran)
    clock.sleep(30)  # past its deadline
    batches = [batch, *(dispatcher.submit([{"uid": f"{i}"}], step=i) for i in (2, 3))]
    assert [one.result(30).succeeded for one in batches] == [3, 3, 3]
    assert calls == {1: 4, 2: 3, 3: 3}
    hang.set()
    assert returns.wait(20)
    dispatcher.close()
    assert len(queue.markers()) == 9
    assert queue.get(["1_0_0"], "train")["responses"][0].tolist() == [1, 1]


def test_a_deadline_runs_from_the_sessions_own_start(make_dispatcher, make_prompts, clock):
    began = {}

    async def worker(prompt, sampling, session):
        began[session.session_id] = clock()
        if session.session_id == 0:  # it ends, so that its deadline is nobody's
            clock.sleep(4)
            return {"responses": torch.zeros(2)}
        asyncio.get_running_loop().call_soon(clock.sleep, 10)
        return await asyncio.Event().wait()

    options = {"max_concurrent_rollouts_per_worker": 1, "session_timeout_s": 10, "max_retries": 0}
    dispatcher = make_dispatcher(worker, 1, n=3, **options)
    report = dispatcher.submit(make_prompts(1), step=1).result(20)
    assert (began, clock()) == ({0: 0, 1: 4, 2: 14}, 24)
    assert set(report.failed) == {("u_0", 1), ("u_0", 2)}
    assert all("dispatch.session_timeout_s" in cause for cause in report.failed.values())


@pytest.mark.parametrize("number", [0, None, 1.5, "2", -1])
def test_a_pool_has_a_whole_number_of_workers(number: Any) -> None:
    for workers, threads, what in ((number, 1, "worker"), (1, number, "thread")):
        with pytest.raises(ValueError, match=f"at least one {what}"):
            LocalPool(lambda session, sample: [], workers, threads=threads)


# -- what an async worker does to its own event loop ------------------------------------------


def exits():
    raise SystemExit(3)


def exits_in_a_task_of_its_own():
    async def leave():
        exits()

    task = asyncio.get_running_loop().create_task(leave())
    task.add_done_callback(asyncio.Task.exception)  # else it is logged in the midst of another test


def forks():
    sessions._copying.acquire()  # as another worker's thread may hold it
    if (child := os.fork()) == 0:
        return  # comes back, in the child
    sessions._copying.release()
    os.waitpid(child, 0)


BLOCKED = threading.Event()
ACTS = {
    "cancels all": lambda: [task.cancel() for task in asyncio.all_tasks()],
    "blocks": lambda: BLOCKED.wait(20),
    "stops its loop": lambda: asyncio.get_running_loop().stop(),
    "exits": exits,
    "exits in a task of its own": exits_in_a_task_of_its_own,
    "forks": forks,
}


@pytest.mark.parametrize("act", ACTS)
def test_what_a_worker_does_costs_its_own_sessions(make_dispatcher, act, monkeypatch):
    """By their deadline; other workers' sessions go on, and it works again, or its successor."""
    monkeypatch.setattr("rlskip.dispatch.timeouts.TURN_S", 0.2)
    BLOCKED.clear()

    class Worker:
        weights = 0

        def load(self, weights):
            self.weights = weights

        async def __call__(self, prompt, sampling, session):
            if prompt["acts"] and session.attempt == 0:
                ACTS[act]()
            if act != "forks":  # asyncio's own check would end the child
                await asyncio.sleep(0.01)
            return {"weights": self.weights, "worker": id(self)}

    retries = {"max_data_retries": 3, "max_retries": 3, "session_timeout_s": 1}
    dispatcher = make_dispatcher(Worker, 2, queue=None, n=2, policy="chunk", **retries)
    dispatcher.broadcast("load", 7)
    with pytest.raises(AttributeError):
        dispatcher.broadcast("laod", 7)
    prompts = [{"uid": f"{i}", "acts": i == 0} for i in range(4)]
    began = time.monotonic()
    rows, _ = dispatcher.collect(prompts, step=1)
    assert time.monotonic() - began < 20
    assert set(rows["weights"]) == {7}
    again = [{"uid": f"{i}", "acts": False} for i in range(8)]
    time.sleep(0.5 if act == "blocks" else 0)  # longer than TURN_S
    batch = dispatcher.submit(again, step=2)
    assert batch.result(20).failed == {}
    rows, _ = dispatcher.collect(step=2)
    assert (set(rows["weights"]), len(set(rows["worker"]))) == ({7}, 2)
    if act == "blocks":
        assert batch.report.attempts == 16, "nothing waits for the worker that blocks"
    BLOCKED.set()


def test_an_end_that_fails_costs_no_other_of_its_turn(make_dispatcher, make_prompts, request):
    ran, refused = [], []

    async def worker(prompt, sampling, session):
        ran.append(session.session_id)
        if ran.count(0) == 1 == len(ran):
            raise ValueError("once")
        return {"responses": torch.ones(1)}

    def refuses(record):  # a filter of the user's own
        if "is tried again" in record.msg and not refused:
            refused.append(record)
            raise SystemExit
        return True

    logger = logging.getLogger("rlskip.dispatch.groups")
    logger.addFilter(refuses)
    request.addfinalizer(lambda: logger.removeFilter(refuses))
    options = {"n": 3, "session_timeout_s": 1, "max_data_retries": 1, "max_retries": 1}
    make_dispatcher(worker, 1, queue=None, **options).collect(make_prompts(1), step=1)
    assert sorted(ran) == [0, 0, 1, 2]
    assert refused
