"""Sessions that fail: retries, deadlines, cancellation, and a queue that refuses."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

import torch

from tests.clock import eventually
from tests.dispatch.conftest import evict


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


def test_a_cancelled_batch_stops_its_sessions_and_starts_no_more(
    make_dispatcher, make_prompts, queue
):
    started, cancelled, all_run = [], Counter(), threading.Event()

    async def worker(prompt, sampling, session):
        started.append(session.step)
        if session.step == 1:
            if len(started) == 3:
                all_run.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled["sessions"] += 1
                raise
        return {"responses": torch.ones(1)}

    dispatcher = make_dispatcher(worker, 3, max_concurrent_rollouts_per_worker=1)
    batch = dispatcher.submit(make_prompts(2), step=1)
    assert all_run.wait(10)
    batch.cancel()
    report = batch.result(10)
    assert set(report.failed.values()) == {"cancelled"}
    assert eventually(lambda: cancelled["sessions"] == 3)  # each on its worker's thread
    assert (started, len(queue.markers())) == ([1] * 3, 8)
    evict(queue, ["u_0", "u_1"])
    # The slots are free again.
    assert dispatcher.submit(make_prompts(2), step=2).result(10).succeeded == 8
    batch = dispatcher.submit(make_prompts(1, of="v"), step=1)
    batch.cancel()
    assert batch.result(10).sessions == 4
