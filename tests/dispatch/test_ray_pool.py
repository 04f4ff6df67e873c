"""RayPool on a real Ray; the rest of it is in test_ray_seats."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import pytest
import torch

from rlskip.dispatch import RolloutDispatcher

pytestmark = pytest.mark.ray


@pytest.fixture
def ray():
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray = pytest.importorskip("ray")
    # The actors cannot import this module.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.usefixtures("ray")
def test_an_actor_killed_under_its_sessions_loses_none(make_prompts, queue, tmp_path):
    from rlskip.dispatch import RayPool

    directory = str(tmp_path)

    class Worker:
        async def __call__(self, prompt, sampling, session):
            name = f"{session.uid}.{session.session_id}.{session.attempt}.{os.getpid()}"
            open(os.path.join(directory, name), "w").close()
            await asyncio.sleep(0.5 if session.attempt == 0 else 0)
            return {"responses": torch.ones(3)}

    config = {"rollout_level": True, "n": 4, "max_concurrent_rollouts_per_worker": 2}
    pool = RayPool(Worker, 2, options={"num_cpus": 0.1})
    with RolloutDispatcher(pool, queue, {"dispatch": config}) as dispatcher:
        batch = dispatcher.submit(make_prompts(2), step=1)
        while not (begun := os.listdir(tmp_path)):
            time.sleep(0.01)
        os.kill(int(begun[0].rsplit(".", 1)[1]), signal.SIGKILL)
        report = batch.result(60)
        assert report.failed == {}
        assert report.attempts > report.sessions == 8
        assert len(queue.markers()) == 8
        dead = begun[0].rsplit(".", 1)[1]
        runs = [name.rsplit(".", 2) for name in os.listdir(tmp_path)]
        # A session that the dead worker had not begun yet left no file of its first attempt.
        kept = {session for session, attempt, pid in runs if attempt == "0" and pid != dead}
        again = {session: pid for session, attempt, pid in runs if attempt == "1"}
        assert again.keys() == {session for session, *_ in runs} - kept
        assert len(kept) + len(again) == 8
        assert 1 <= len(again) <= 2
        assert dead not in again.values()
        # The seat is taken again: both workers work.
        assert dispatcher.submit(make_prompts(4, of="v"), step=2).result().failed == {}
