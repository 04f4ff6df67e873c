from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import pytest
import torch

from rlskip.dispatch import RolloutDispatcher
from tests.clock import eventually

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def ray():
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray = pytest.importorskip("ray")
    # The actors cannot import this module.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def make_ray_dispatcher(ray, queue):
    from rlskip.dispatch import RayPool

    made = []

    def make(worker, workers=2, *, options=None, restarts=3, **dispatch):
        pool = RayPool(worker, workers, options={"num_cpus": 0.1}, restarts=restarts)
        config = {"dispatch": {"rollout_level": True, "n": 4, "session_timeout_s": 60, **dispatch}}
        made.append(RolloutDispatcher(pool, queue, config))
        return made[-1]

    yield make
    for dispatcher in made:
        dispatcher.close()


async def draw(prompt, sampling, session):
    generator = torch.Generator().manual_seed(session.seed)
    return {"responses": torch.randint(0, 1000, (5,), generator=generator) + prompt["input_ids"][0]}


def test_an_actor_killed_under_its_sessions_loses_none(
    make_ray_dispatcher, make_prompts, queue, tmp_path
):
    directory = str(tmp_path)

    class Worker:
        async def __call__(self, prompt, sampling, session):
            name = f"{session.uid}.{session.session_id}.{session.attempt}.{os.getpid()}"
            open(os.path.join(directory, name), "w").close()
            await asyncio.sleep(0.5 if session.attempt == 0 else 0)
            return {"responses": torch.ones(3)}

    dispatcher = make_ray_dispatcher(Worker, max_concurrent_rollouts_per_worker=2)
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


def test_a_prompt_is_sent_to_a_worker_at_most_once(make_ray_dispatcher, make_prompts, monkeypatch):
    from rlskip.dispatch import ray_pool

    sent = []
    pack = ray_pool.pack

    def counting(value):
        if isinstance(value, list):  # what an actor is told
            sent.extend(args[0] for method, *args in value if method == "know")
        return pack(value)

    monkeypatch.setattr(ray_pool, "pack", counting)
    dispatcher = make_ray_dispatcher(
        draw, policy="round_robin", max_concurrent_rollouts_per_worker=3
    )
    dispatcher.submit(make_prompts(6), step=1).result()
    assert len(set(sent)) == 6
    assert len(sent) == 6 * 2  # two workers


@pytest.mark.parametrize("how", ["deadline", "cancelled"])
def test_what_is_given_up_is_cancelled_in_the_actor(
    make_ray_dispatcher, make_prompts, tmp_path, how
):
    directory = str(tmp_path)

    class Worker:
        async def __call__(self, prompt, sampling, session):
            name = os.path.join(directory, f"{session.session_id}.{session.attempt}.")
            open(name + "began", "w").close()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                open(name + "cancelled", "w").close()
                raise

    def wait_for(state, count):
        assert eventually(lambda: len(list(tmp_path.glob(f"*.{state}"))) == count)

    seconds, attempts = (0.5, 2) if how == "deadline" else (60, 1)
    dispatcher = make_ray_dispatcher(Worker, n=2, session_timeout_s=seconds, max_retries=1)
    batch = dispatcher.submit(make_prompts(1), step=1)
    if how == "cancelled":
        wait_for("began", 2)
        batch.cancel()
    report = batch.result(60)
    assert report.attempts == 2 * attempts
    assert all(how in cause for cause in report.failed.values())
    wait_for("cancelled", 2 * attempts)


def test_a_worker_is_replaced_as_often_as_restarts_allow(make_ray_dispatcher, tmp_path):
    directory = str(tmp_path)

    class Worker:
        async def __call__(self, prompt, sampling, session):
            open(os.path.join(directory, f"{os.getpid()}"), "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

    dispatcher = make_ray_dispatcher(Worker, 1, restarts=1, n=1, max_retries=5)
    report = dispatcher.submit([{"uid": "u"}], step=1).result(120)
    assert len(os.listdir(tmp_path)) == 2
    assert report.failed == {("u", 0): "no worker is left"}
