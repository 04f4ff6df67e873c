"""RayPool: on a Ray of this process, which places actors when told to, and on a real one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from rlskip.dispatch import InfrastructureFailure, RolloutDispatcher
from tests.clock import eventually
from tests.dispatch.conftest import evict

ray_pool = pytest.importorskip("rlskip.dispatch.ray_pool")


class Actor:
    def __init__(self, make, is_placed):
        self._make, self._loop = make, asyncio.get_running_loop()
        self._placed, self._dead = asyncio.Event(), asyncio.Event()
        self.blocks = False  # whether its event loop stands still
        if is_placed:
            self.place()

    def place(self):
        self._made = self._make()
        self._loop.call_soon_threadsafe(self._placed.set)

    def die(self):
        self._loop.call_soon_threadsafe(self._dead.set)

    def __getattr__(self, name):
        async def act(args):
            await (self._dead if self.blocks else self._placed).wait()
            return await getattr(self._made, name)(*args)

        async def run(*args):
            done, dead = map(asyncio.ensure_future, (act(args), self._dead.wait()))
            await asyncio.wait([done, dead], return_when=asyncio.FIRST_COMPLETED)
            dead.cancel()
            if not done.done() or self.blocks:
                raise ray_pool.RayActorError
            return done.result()

        return type("Method", (), {"remote": lambda _, *args: asyncio.ensure_future(run(*args))})()


class Ray:
    """Places the first `room` actors at once, and the others when :meth:`Actor.place` is called."""

    def __init__(self, room):
        self.room, self.actors = room, []

    def remote(self, kind):
        ray = self

        class Options:
            def remote(self, *args):
                ray.actors.append(Actor(lambda: kind(*args), len(ray.actors) < ray.room))
                return ray.actors[-1]

        return SimpleNamespace(options=lambda **_: Options())

    def is_initialized(self):
        return True

    def init(self):
        threading.Event().wait(60)

    def cluster_resources(self):
        return {"CPU": 2.0, "node:10.0.0.1": 1.0}

    def available_resources(self):
        return {"CPU": 0.5}

    def put(self, value):
        return value

    def kill(self, actor):
        actor.die()


class Worker:
    weights = 0

    async def __call__(self, prompt, sampling, session):
        await asyncio.sleep(0.3 if session.attempt == 0 else 0)
        return {"responses": torch.full((1,), self.weights)}

    def load(self, weights):
        self.weights = weights


@pytest.fixture
def make(monkeypatch, make_dispatcher):
    def make(room=2, start_s=100.0, workers=2, worker=Worker, restarts=3, **dispatch):
        ray = Ray(room)
        monkeypatch.setattr(ray_pool, "ray", ray)
        monkeypatch.setattr("rlskip.dispatch.timeouts.START_S", start_s)
        usual = {"max_concurrent_rollouts_per_worker": 2, "session_timeout_s": 100.0}
        pool = ray_pool.RayPool(worker, workers, restarts=restarts)
        return ray, make_dispatcher(pool, **{**usual, **dispatch})

    return make


def kill_first(ray):
    assert eventually(lambda: ray.actors)
    time.sleep(0.1)
    ray.actors[0].die()


def test_nothing_waits_for_a_successor_that_ray_cannot_place(make, make_prompts):
    ray, dispatcher = make()
    dispatcher.broadcast("load", 0)
    batch = dispatcher.submit(make_prompts(2), step=1)
    kill_first(ray)
    report = batch.result(60)
    assert report.failed == {}
    assert report.attempts > report.sessions == 8
    assert len(ray.actors) == 3
    assert dispatcher.submit(make_prompts(1, of="v"), step=2).result().failed == {}
    dispatcher.close()
    assert len(ray.actors) == 3, "who ends then is not replaced"


def test_an_actor_that_blocks_its_event_loop_is_replaced(make, make_prompts, monkeypatch):
    monkeypatch.setattr("rlskip.dispatch.timeouts.ASK_S", 0.1)

    class Blocks:
        async def __call__(self, prompt, sampling, session):
            if not ray.actors[2:]:
                ray.actors[0].blocks = ray.actors[1].blocks = True
                await asyncio.sleep(60)
            return {"responses": torch.ones(1)}

    ray, dispatcher = make(9, worker=Blocks, session_timeout_s=0.3)
    dispatcher.submit(make_prompts(1), step=1).result(60)
    assert eventually(lambda: len(ray.actors) == 4)
    assert dispatcher.submit(make_prompts(1, of="v"), step=2).result(60).succeeded == 4


def test_a_prompt_is_sent_to_an_actor_once_and_forgotten(make, make_prompts, monkeypatch):
    sent, pack = [], ray_pool.pack

    def counting(value):
        if isinstance(value, list):  # what an actor is told
            sent.extend(args[0] for method, *args in value if method == "know")
        return pack(value)

    monkeypatch.setattr(ray_pool, "pack", counting)
    ray, dispatcher = make(policy="round_robin")
    assert dispatcher.submit(make_prompts(3), step=1).result(60).failed == {}
    assert (len(set(sent)), len(sent)) == (3, 3 * 2)
    assert eventually(lambda: not any(actor._made._prompts for actor in ray.actors))


@pytest.mark.parametrize("how", ["deadline", "cancelled"])
@pytest.mark.parametrize("pool", ["local", "ray"])
def test_what_is_given_up_is_cancelled_where_it_runs(
    make, make_dispatcher, make_prompts, queue, how, pool
):
    """And no more of its batch starts; the slots are free again."""
    began, cancelled = [], []

    class Waits:
        async def __call__(self, prompt, sampling, session):
            began.append(session)
            try:
                await asyncio.sleep(60 if session.step == 1 else 0)
            except asyncio.CancelledError:
                cancelled.append(session)
                raise
            return {"responses": torch.ones(1)}

    limits = {"session_timeout_s": 0.2 if how == "deadline" else 60, "max_retries": 1}
    limits |= {"max_concurrent_rollouts_per_worker": 1}
    if pool == "local":
        dispatcher = make_dispatcher(Waits, 2, **limits)
    else:
        _, dispatcher = make(worker=Waits, **limits)
    batch = dispatcher.submit(make_prompts(1), step=1)
    if how == "cancelled":
        assert eventually(lambda: len(began) == 2)
        batch.cancel()
    report = batch.result(60)
    causes = {*report.failed.values()}
    assert causes == {"cancelled"} if how == "cancelled" else all(how in cause for cause in causes)
    assert eventually(lambda: {*cancelled} == {*began})
    assert report.attempts == len(began) == (8 if how == "deadline" else 2)
    assert len(queue.markers()) == 4
    evict(queue, ["u_0"])
    assert dispatcher.submit(make_prompts(1), step=2).result(20).succeeded == 4
    batch = dispatcher.submit(make_prompts(1, of="v"), step=1)
    assert (batch.cancel(), batch.result(10).sessions) == (False, 4)


@pytest.mark.parametrize(
    ("room", "more", "successor"),
    [
        (9, {"restarts": 1, "max_retries": 5}, None),
        (1, {"start_s": 1.0}, None),
        (9, {}, OSError("the port is taken")),
    ],
    ids=["after its restarts", "not placed in time", "cannot be made"],
)
def test_a_worker_without_a_successor_is_lost(make, room, more, successor):
    made = []

    class Dies:
        def __init__(self):
            made.append(self)
            if successor and made[1:]:
                raise successor

        async def __call__(self, prompt, sampling, session):
            ray.actors[-1].die()
            await asyncio.sleep(60)

    ray, dispatcher = make(room, workers=1, worker=Dies, **more)
    report = dispatcher.submit([{"uid": "u"}], step=1).result(60)
    assert len(ray.actors) == (1 if successor else 2)
    assert {*report.failed.values()} == {"no worker is left"}


@pytest.mark.parametrize("dies", [False, True])
def test_a_successor_gets_the_broadcasts_that_it_missed(make, make_prompts, dies):
    """So does that of one that dies before it is placed."""
    ray, dispatcher = make(workers=1, room=1, queue=None)
    dispatcher.broadcast("load", 7)
    batch = dispatcher.submit(make_prompts(1), step=1)
    kill_first(ray)
    assert eventually(lambda: len(ray.actors) == 2)
    dispatcher.broadcast("load", 42)
    if dies:
        ray.actors[1].die()
        assert eventually(lambda: len(ray.actors) == 3)
    ray.actors[-1].place()
    assert batch.result(60).failed == {}
    rows, _ = dispatcher.collect(step=1)
    assert rows["responses"].values().tolist() == [42] * 4


@pytest.mark.parametrize("is_up", [True, False])
def test_what_ray_does_not_start_is_named_with_what_it_has(make, is_up, monkeypatch):
    """Neither its own start nor the placement of actors waits without a deadline."""
    monkeypatch.setattr(Ray, "is_initialized", lambda ray: is_up)
    with pytest.raises(InfrastructureFailure) as error:
        make(room=1, start_s=0.3, workers=3)
    what = "did not start all actors" if is_up else "Ray did not start"
    for fact in (what, "within 0.3 s", "3 actors, each with num_cpus=1", "CPU=2 (0.5 free)"):
        assert fact in error.value.what
    assert error.value.where == "dispatch.workers"


class NodeLost(InfrastructureFailure):
    """Its constructor takes other arguments than pickle gives it."""

    def __init__(self, *, node):
        super().__init__(f"node {node} is gone")


class Unreadable:
    """Crosses between driver and actor, and cannot be read there."""

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return int, ("no number",)


class Unsendable(Unreadable):
    def __reduce__(self):
        raise TypeError("stays here")


def test_what_fails_on_the_way_fails_alone_with_kind_and_text(make):
    def fail(error):
        raise error

    acts = {
        "node": lambda: fail(NodeLost(node="a")),
        "cancelled": lambda: fail(asyncio.CancelledError()),
        "engine": lambda: fail(ConnectionError("engine")),
        "result unsendable": lambda: {"x": Unsendable()},
        "result unreadable": lambda: {"x": Unreadable()},
    }

    async def worker(prompt, sampling, session):
        return acts.get(session.uid, lambda: {"responses": torch.ones(1)})()

    _, dispatcher = make(workers=1, room=1, worker=worker)
    odd = {"prompt unsendable": Unsendable(), "prompt unreadable": Unreadable()}
    prompts = [{"uid": uid, "odd": odd.get(uid), "__rollout_n__": 1} for uid in [*acts, *odd, "ok"]]
    report = dispatcher.submit(prompts, step=1).result(60)
    failed = {uid: cause for (uid, _), cause in report.failed.items()}
    assert failed == {
        "node": "infrastructure: node a is gone",
        "cancelled": "infrastructure: cancelled",
        "engine": "infrastructure: ConnectionError: engine",
        "result unsendable": "data: its result cannot be sent: stays here",
        "result unreadable": f"data: its result cannot be read: {NO_NUMBER}",
        "prompt unsendable": "data: its prompt cannot be sent: stays here",
        "prompt unreadable": f"data: its prompt cannot be read in the actor: {NO_NUMBER}",
    }


NO_NUMBER = "invalid literal for int() with base 10: 'no number'"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(2, requires_grad=True),
        torch.eye(3).to_sparse(),
        torch.ones(2, device="meta"),
        torch.nested.as_nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tensor.layout} {tensor.device}",
)
def test_tensors_of_every_kind_cross(tensor):
    crossed = ray_pool.unpack(ray_pool.pack({"x": [tensor]}), "no")["x"][0]
    kind = (type(tensor), tensor.dtype, tensor.layout, tensor.device, tensor.requires_grad)
    assert kind == (
        type(crossed), crossed.dtype, crossed.layout, crossed.device, crossed.requires_grad
    )  # fmt: skip
    if tensor.layout is torch.strided and tensor.device.type == "cpu":
        assert torch.equal(crossed, tensor)
        crossed.detach().zero_()  # its memory can be written to


@pytest.mark.ray
def test_an_actor_killed_under_its_sessions_loses_none(make_prompts, queue, tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # The actors cannot import this module.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    directory = str(tmp_path)

    class Worker:
        async def __call__(self, prompt, sampling, session):
            name = f"{session.uid}.{session.session_id}.{session.attempt}.{os.getpid()}"
            open(os.path.join(directory, name), "w").close()
            await asyncio.sleep(0.5 if session.attempt == 0 else 0)
            return {"responses": torch.ones(3)}

    dispatch = {"rollout_level": True, "n": 4, "max_concurrent_rollouts_per_worker": 2}
    with ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False):
        pool = ray_pool.RayPool(Worker, 2, options={"num_cpus": 0.1})
        with RolloutDispatcher(pool, queue, {"dispatch": dispatch}) as dispatcher:
            batch = dispatcher.submit(make_prompts(2), step=1)
            while not (begun := os.listdir(tmp_path)):
                time.sleep(0.01)
            os.kill(int(begun[0].rsplit(".", 1)[1]), signal.SIGKILL)
            report = batch.result(60)
            assert report.failed == {}
            assert report.attempts > report.sessions == 8
            assert len(queue.markers()) == 8
            dead = begun[0].rsplit(".", 1)[1]
            runs = [name.rsplit(".", 2)[1:] for name in os.listdir(tmp_path)]
            again = [pid for attempt, pid in runs if attempt == "1"]
            assert 1 <= len(again) == report.attempts - 8 <= 2
            assert dead not in again
            # The seat is taken again: both workers work.
            assert dispatcher.submit(make_prompts(4, of="v"), step=2).result().failed == {}
