from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import pytest
import torch

from rlskip.dispatch import RolloutDispatcher
from rlskip.keys import split_trajectory
from tests.clock import eventually
from tests.dispatch.conftest import evict

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


def test_failures_keep_their_kind_on_the_way(make_ray_dispatcher, make_prompts):
    async def worker(prompt, sampling, session):
        if session.session_id == 0:
            raise ValueError("bad prompt")
        if session.session_id == 1:
            raise ConnectionError("engine")
        if session.session_id == 2:
            return {"responses": torch.ones(1), "odd": Unsendable()}
        return {"responses": torch.ones(1)}

    dispatcher = make_ray_dispatcher(worker, max_retries=0, max_data_retries=0)
    failed = dispatcher.submit(make_prompts(1), step=1).result().failed
    assert failed["u_0", 0] == "data: ValueError: bad prompt"
    assert failed["u_0", 1] == "infrastructure: ConnectionError: engine"
    assert failed["u_0", 2].startswith("data: its result cannot be sent")
    assert len(failed) == 3


def test_a_prompt_is_sent_to_a_worker_at_most_once(make_ray_dispatcher, make_prompts, monkeypatch):
    from rlskip.dispatch import ray_pool

    sent = []
    pack = ray_pool.pack

    def counting(value):
        if isinstance(value, tuple) and len(value) == 4:
            sent.extend(value[1])
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


class Unreadable:
    """Crosses between driver and actor, and cannot be read there."""

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return int, ("no number",)


class Unsendable:
    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise TypeError("stays here")


def test_a_prompt_that_cannot_cross_fails_its_sessions_at_once(make_ray_dispatcher):
    prompts = [
        {"uid": "good", "input_ids": torch.ones(3)},
        {"uid": "unreadable", "input_ids": torch.ones(3), "odd": Unreadable()},
        {"uid": "unsendable", "input_ids": torch.ones(3), "odd": Unsendable()},
    ]
    report = make_ray_dispatcher(draw, n=2).submit(prompts, step=1).result(30)
    assert report.succeeded == 2
    causes = {uid: cause for (uid, _), cause in report.failed.items()}
    assert causes["unreadable"].startswith("data: its prompt cannot be read in the actor")
    assert causes["unsendable"].startswith("data: its prompt cannot be sent: stays here")


def test_broadcast_reaches_every_worker_and_its_successor(
    make_ray_dispatcher, make_prompts, queue, ray
):
    class Worker:
        weights = torch.zeros(1)

        async def __call__(self, prompt, sampling, session):
            return {"responses": self.weights, "pid": os.getpid()}

        def load(self, weights):
            weights += 1  # its own copy
            self.weights = weights

    dispatcher = make_ray_dispatcher(Worker)
    dispatcher.broadcast("load", torch.tensor([41.0]))
    dispatcher.submit(make_prompts(2), step=1).result()
    keys = sorted(filter(split_trajectory, queue.list("train")))
    assert queue.get(keys, "train")["responses"].values().tolist() == [42.0] * 8
    pids = set(queue.get(keys, "train")["pid"])
    assert len(pids) == 2
    os.kill(pids.pop(), signal.SIGKILL)
    time.sleep(0.5)
    evict(queue, ["u_0", "u_1"])
    dispatcher.submit(make_prompts(2), step=2).result()
    assert queue.get(keys, "train")["responses"].values().tolist() == [42.0] * 8


def test_a_result_that_cannot_be_unpickled_fails_its_session_alone(
    make_ray_dispatcher, make_prompts
):
    async def worker(prompt, sampling, session):
        more = {"odd": Unreadable()} if session.session_id == 1 else {}
        return {"responses": torch.ones(1), **more}

    dispatcher = make_ray_dispatcher(worker, 1, restarts=0, max_data_retries=0)
    report = dispatcher.submit(make_prompts(2), step=1).result(60)
    assert report.failed.keys() == {("u_0", 1), ("u_1", 1)}
    assert "its result cannot be read" in report.failed["u_0", 1]


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_worker_is_replaced_as_often_as_restarts_allow(
    make_ray_dispatcher, queue, tmp_path, deaths
):
    directory = str(tmp_path)

    class Worker:
        async def __call__(self, prompt, sampling, session):
            if session.attempt < deaths:
                open(os.path.join(directory, f"{os.getpid()}"), "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            # The same prompt was sent to the actor that died: its successor needs it, too.
            return {"responses": prompt["input_ids"]}

    dispatcher = make_ray_dispatcher(Worker, 1, restarts=1, n=1, max_retries=5)
    prompts = [{"uid": "u", "input_ids": torch.ones(3)}]
    report = dispatcher.submit(prompts, step=1).result(120)
    assert len(os.listdir(tmp_path)) == deaths
    if deaths == 1:
        assert report.failed == {}
        assert queue.get(["u_0_0"], "train")["responses"][0].tolist() == [1, 1, 1]
    else:
        assert report.failed == {("u", 0): "no worker is left"}
