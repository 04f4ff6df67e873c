"""RayPool: every worker is an actor. Sessions and results travel in batches."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import logging
import pickle
from collections.abc import Mapping
from typing import Any

import attrs
import ray
import torch
from ray import cloudpickle
from ray.exceptions import RayActorError

from rlskip.batch.columns import own
from rlskip.dispatch import timeouts
from rlskip.dispatch.pools import THREADS, Pool, Runner, Worker
from rlskip.dispatch.scheduler import Job
from rlskip.dispatch.sessions import (
    NOTHING,
    DataFailure,
    InfrastructureFailure,
    Returned,
    SessionFailure,
    WorkerLostError,
    as_failure,
    text_of,
)
from rlskip.dispatch.timeouts import LoopThread, failure_of, in_thread

COALESCE_S = 0.002  # that a session or a result waits for others to travel with it

logger = logging.getLogger(__name__)


class RayPool(Pool):
    """Workers as Ray actors; each runs any number of sessions at once.

    A prompt is sent to an actor once, with the first of its sessions; sessions and results are
    gathered for a moment and sent together. When an actor dies its sessions fail, and another
    actor replaces it, at most `restarts` times. `worker` and `threads` are as for LocalPool: a
    class is made once in each actor, where it may load its model. `options` are those of
    ``ray.remote`` for an actor, e.g. ``{"num_gpus": 1}``. Ray is initialised with its defaults
    unless it is already.
    """

    def __init__(
        self,
        worker: Worker,
        workers: int = 4,
        *,
        threads: int = THREADS,
        options: Mapping[str, Any] | None = None,
        restarts: int = 3,
    ) -> None:
        super().__init__(worker, workers, threads)
        usual = {"max_concurrency": 10_000, "scheduling_strategy": "SPREAD"}
        self.options = {**usual, **(options or {})}
        self.restarts = [restarts] * self.workers  # of each that are left
        self.calls: dict[str, Any] = {}  # the last broadcasts; a new actor gets them first
        self.ids = itertools.count()
        self._drivers: dict[int, _Driver] = {}  # of the workers that are not lost

    async def open(self, groups: Any) -> None:
        ends = asyncio.get_running_loop().time() + timeouts.START_S
        if not ray.is_initialized():

            async def start() -> None:
                ray.init()

            # On a thread that stays: Ray's processes end with the thread that started them.
            started = LoopThread("rlskip-ray").ask(start)
            await self._until(ends, asyncio.wrap_future(started), "Ray did not start")
        self.groups = groups
        first = [_Driver(i, self) for i in range(self.workers)]
        self._drivers.update(enumerate(first))
        # An actor that cannot start raises in its first call.
        waits = [wait for one in first for wait in (one.actor.hello.remote(), one.ready.wait())]
        await self._until(ends, asyncio.gather(*waits), "Ray did not start all actors")

    def replace(self, number: int) -> str:
        """A worker's actor has ended; returns what becomes of the worker."""
        if self.restarts[number] > 0:
            self.restarts[number] -= 1
            self._drivers[number] = _Driver(number, self)
        else:
            del self._drivers[number]
        is_back = number in self._drivers
        self.groups.worker_changed(number, "away" if is_back else "lost")
        return "replaced" if is_back else "lost"

    async def _until(self, ends: float, started: asyncio.Future[Any], what: str) -> None:
        """Wait for Ray; the error names what was asked of it, and what it has."""
        left = ends - asyncio.get_running_loop().time()
        try:
            await asyncio.wait_for(started, max(0.0, left))
        except asyncio.TimeoutError as error:
            needs = {"num_cpus": 1, **self.options}  # as Ray places an actor
            each = ", ".join(f"{k}={v}" for k, v in needs.items() if k != "max_concurrency")
            raise InfrastructureFailure(
                f"{what} within {timeouts.START_S:g} s. Asked for: {self.workers} actors, each "
                f"with {each}. There is: {await resources()}",
                "dispatch.workers",
                "set fewer workers, ask less for each (RayPool(options=...)), or give Ray more; "
                "`ray status` says what waits",
            ) from error

    def start(self, job: Job) -> None:
        self._drivers[job.worker].start(job)

    def stop(self, job: Job) -> None:
        if job.worker in self._drivers:
            self._drivers[job.worker].stop(job)

    def forget(self, prompt: Any) -> None:
        prompt.packed = None
        for driver in self._drivers.values():
            driver.forget(prompt.id)

    async def broadcast(self, method: str, *args: Any) -> None:
        self.calls[method] = packed = ray.put(args)
        await asyncio.gather(*(one.call(method, packed) for one in self._drivers.values()))

    async def close(self) -> None:
        for driver in self._drivers.values():
            driver.close()


async def resources() -> str:
    """What Ray has, and what of it is free."""
    asked = in_thread(lambda: (ray.cluster_resources(), ray.available_resources()))
    if await failure_of(asked, timeouts.ASK_S, "Ray") is not None:
        return "unknown (Ray does not answer)"
    has, free = asked.result()
    named = {k: v for k, v in has.items() if not k.startswith(("node:", "object_store"))}
    return ", ".join(f"{k}={v:g} ({free.get(k, 0):g} free)" for k, v in sorted(named.items()))


class _Driver:
    """The driver's side of an actor, which serves until that ends."""

    def __init__(self, number: int, pool: RayPool) -> None:
        self._number = number
        self._pool = pool
        self.actor: Any = ray.remote(Actor).options(**pool.options).remote(pool.worker)
        self._up = False  # whether it takes sessions
        self._known: set[int] = set()  # the prompts that it has
        self._running: dict[int, Job] = {}
        self._message = _Message()
        self._timer: asyncio.Handle | None = None
        self._asked = False  # whether its loop turns, and it has not answered
        self.ready = asyncio.Event()  # set once it is up, or has ended
        self._task = asyncio.ensure_future(self._serve())

    async def _serve(self) -> None:
        try:
            cause = await self._take_results()
        except RayActorError as error:
            cause = " ".join(str(error).split())
        except Exception as error:  # a broadcast failed, or results cannot be read
            logger.exception("worker %d is given up", self._number)
            cause = f"{type(error).__name__}: {text_of(error)}"
        ray.kill(self.actor)
        self._up = False
        self.ready.set()
        what = self._pool.replace(self._number)
        logger.warning("worker %d ended: %s; it is %s", self._number, cause, what)
        lost = WorkerLostError(f"worker {self._number} died: {cause}")
        for number in list(self._running):
            self._settle(number, lost)

    async def _take_results(self) -> str:
        """Take its results until it ends; returns why it does not begin."""
        try:
            await asyncio.wait_for(self.actor.hello.remote(), timeouts.START_S)
        except asyncio.TimeoutError:
            self._pool.restarts[self._number] = 0
            has = await resources()
            return f"Ray did not place it within {timeouts.START_S:g} s; there is: {has}"
        told: dict[str, Any] = {}
        calls = self._pool.calls
        while todo := {m: args for m, args in calls.items() if told.get(m) is not args}:
            for method, args in todo.items():
                await self.actor.call.remote(method, args)
            told.update(todo)
        self._up = True
        self.ready.set()
        self._pool.groups.worker_changed(self._number, "back")
        self._soon()
        while True:
            for number, packed in pickle.loads(await self.actor.results.remote()):
                self._settle(number, packed and unpack(packed, "its result cannot be read"))

    def start(self, job: Job) -> None:
        number, prompt = next(self._pool.ids), job.group
        self._running[number] = job
        try:
            if prompt.id not in self._known:
                prompt.packed = prompt.packed or pack(prompt.fields)  # once for all actors
                self._message.prompts[prompt.id] = prompt.packed
                self._known.add(prompt.id)
        except Exception as error:
            self._settle(number, DataFailure(f"its prompt cannot be sent: {text_of(error)}"))
            return
        self._message.sessions.append((number, prompt.id, prompt.sampling, job.session))
        self._soon()

    def stop(self, job: Job) -> None:
        self._message.stopped += [n for n, other in self._running.items() if other is job]
        self._soon()
        if self._up and not self._asked:
            self._asked = True
            self._asking = asyncio.ensure_future(self._ask())

    async def _ask(self) -> None:
        """End an actor whose event loop does not answer; another one replaces it."""
        with contextlib.suppress(RayActorError):  # it has died, which is noticed elsewhere
            try:
                await asyncio.wait_for(self.actor.hello.remote(), timeouts.ASK_S)
            except asyncio.TimeoutError:
                logger.warning("worker %d blocks its event loop, and is replaced", self._number)
                ray.kill(self.actor)
            self._asked = False

    def forget(self, prompt: int) -> None:
        if prompt in self._known:
            self._known.discard(prompt)
            self._message.forgotten.append(prompt)

    async def call(self, method: str, args: Any) -> None:
        if self._up:
            with contextlib.suppress(RayActorError):  # its successor gets the call first
                await self.actor.call.remote(method, args)

    def close(self) -> None:
        self._task.cancel()
        ray.kill(self.actor)

    def _soon(self) -> None:
        """Send what has gathered, in a moment."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(COALESCE_S, self._flush)

    def _flush(self) -> None:
        self._timer = None
        if self._up:
            message, self._message = self._message, _Message()
            try:
                # As bytes: Ray would walk through a list of tuples in Python.
                self.actor.take.remote(pack(message))
            except Exception as error:  # what cannot be sent
                for number, *_ in message.sessions:
                    self._settle(number, as_failure(error))

    def _settle(self, number: int, result: Any) -> None:
        error = result if isinstance(result, SessionFailure) else None
        found = NOTHING if error or result is None else result
        self._pool.groups.returned(self._running.pop(number), found, error)


@attrs.define
class _Message:
    """What an actor is sent at once."""

    sessions: list[tuple[Any, ...]] = attrs.field(factory=list)
    prompts: dict[int, bytes] = attrs.field(factory=dict)  # those of them that it has not yet
    stopped: list[int] = attrs.field(factory=list)
    forgotten: list[int] = attrs.field(factory=list)


class Actor:
    """The actor's side: runs sessions, and returns their results when asked."""

    def __init__(self, worker: Worker) -> None:
        self._runner = Runner(worker, self._ended)
        self._prompts: dict[int, Any] = {}
        self._results: list[tuple[int, bytes | None]] = []
        self._some = asyncio.Event()

    async def hello(self) -> None: ...

    async def take(self, packed: bytes) -> None:
        message: _Message = pickle.loads(packed)
        for key, fields in message.prompts.items():
            self._prompts[key] = unpack(fields, "its prompt cannot be read in the actor")
        for number, key, sampling, session in message.sessions:
            if isinstance(prompt := self._prompts[key], SessionFailure):
                self._ended(number, NOTHING, prompt)
            else:
                self._runner.start(number, prompt, sampling, session)
        for number in message.stopped:
            self._runner.stop(number)
        for key in message.forgotten:
            self._prompts.pop(key, None)

    def _ended(self, number: int, result: Returned, error: BaseException | None) -> None:
        packed = None  # as short as what most workers of verl's return
        try:
            if error is not None:
                # Its kind and its text: any process can load these, whatever its class is.
                is_machine = isinstance(as_failure(error), InfrastructureFailure)
                kind = InfrastructureFailure if is_machine else DataFailure
                packed = pack(kind(text_of(as_failure(error))))
            elif result != NOTHING:
                packed = pack(result)
        except Exception as refused:  # each on its own, so that what cannot be sent fails alone
            packed = pack(DataFailure(f"its result cannot be sent: {text_of(refused)}"))
        self._results.append((number, packed))
        self._some.set()

    async def results(self) -> bytes:
        """The results since the last call; waits until there is one."""
        await self._some.wait()
        await asyncio.sleep(COALESCE_S)
        self._some.clear()
        results, self._results = self._results, []
        return pickle.dumps(results)

    async def call(self, method: str, args: tuple[Any, ...]) -> None:
        await self._runner.call(method, own(args))


class _Pickler(cloudpickle.Pickler):
    """Tensors go as numpy arrays: torch's own way through torch.save takes twenty times longer."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor:
            with contextlib.suppress(TypeError, RuntimeError):  # numpy has not all kinds of tensors
                return torch.from_numpy, (value.numpy(),)
        return super().reducer_override(value)


def pack(value: Any) -> bytes:
    """Pickle `value` for another process of the same run."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def unpack(packed: bytes, failed: str) -> Any:
    """The pickled value, or a failure if it cannot be unpickled in this process."""
    try:
        return pickle.loads(packed)
    except Exception as error:
        return DataFailure(f"{failed}: {text_of(error)}")
