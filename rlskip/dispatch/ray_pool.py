"""RayPool: every worker is an actor. Sessions and results travel in batches."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import operator
import pickle
from collections.abc import Mapping
from typing import Any

import attrs
import ray
from ray.exceptions import RayActorError

from rlskip.dispatch import timeouts
from rlskip.dispatch.actor import COALESCE_S, Actor, pack, unpack
from rlskip.dispatch.pools import THREADS, Pool, Worker
from rlskip.dispatch.scheduler import Job
from rlskip.dispatch.sessions import (
    NOTHING,
    DataFailure,
    InfrastructureFailure,
    Session,
    SessionFailure,
    WorkerLostError,
    as_failure,
    text_of,
)
from rlskip.dispatch.timeouts import LoopThread, failure_of, in_thread

logger = logging.getLogger(__name__)

START_S = 280.0
"""Seconds that Ray and the actors may take to start, placement groups included."""


class RayPool(Pool):
    """Workers as Ray actors; each runs any number of sessions at once.

    A prompt is sent to an actor once, with the first of its sessions; sessions and results are
    gathered for a moment and sent together. When an actor dies its sessions fail, and another
    actor replaces it, at most `restarts` times. `worker` and `threads` are as for LocalPool: a
    class is made once in each actor, where it may load its model. `options` are those of
    ``ray.remote`` for an actor, e.g. ``{"num_gpus": 1}``.

    Ray is initialised with its defaults unless it is already.
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
        self.restarts = restarts
        self._drivers: list[_Driver] = []
        self._packed: dict[int, bytes] = {}

    async def open(self, groups: Any) -> None:
        self.changed, self.returned = groups.worker_changed, groups.returned
        ends = asyncio.get_running_loop().time() + START_S
        if not ray.is_initialized():

            async def start() -> None:
                ray.init()

            # On a thread that stays: Ray's processes end with the thread that started them.
            started = LoopThread("rlskip-ray").ask(start)
            await self._until(ends, asyncio.wrap_future(started), "Ray did not start")
        self._drivers = [_Driver(i, self) for i in range(self.workers)]
        # An actor that cannot start raises here.
        hellos = asyncio.gather(*(driver.actor.hello.remote() for driver in self._drivers))
        await self._until(ends, hellos, "Ray did not start all actors")
        ready = asyncio.gather(*(driver.ready.wait() for driver in self._drivers))
        await self._until(ends, ready, "Ray did not start all actors")

    async def _until(self, ends: float, started: asyncio.Future[Any], what: str) -> None:
        """Wait for Ray; the error names what was asked of it, and what it has."""
        left = ends - asyncio.get_running_loop().time()
        try:
            await asyncio.wait_for(started, max(0.0, left))
        except asyncio.TimeoutError as error:
            needs = {"num_cpus": 1, **self.options}  # as Ray places an actor
            each = ", ".join(f"{k}={v}" for k, v in needs.items() if k != "max_concurrency")
            raise InfrastructureFailure(
                f"{what} within {START_S:g} s. Asked for: {self.workers} actors, each with {each}. "
                f"There is: {await self.resources()}",
                "dispatch.workers",
                "set fewer workers, ask less for each (RayPool(options=...)), or give Ray more; "
                "`ray status` says what waits",
            ) from error

    async def resources(self) -> str:
        """What Ray has, and what of it is free."""
        asked = in_thread(lambda: (ray.cluster_resources(), ray.available_resources()))
        if await failure_of(asked, timeouts.ASK_S, "Ray") is not None:
            return "unknown (Ray does not answer)"
        has, free = asked.result()
        named = {k: v for k, v in has.items() if not k.startswith(("node:", "object_store"))}
        return ", ".join(f"{k}={v:g} ({free.get(k, 0):g} free)" for k, v in sorted(named.items()))

    def start(self, job: Job) -> None:
        self._drivers[job.worker].start(job)

    def stop(self, job: Job) -> None:
        self._drivers[job.worker].stop(job)

    def packed(self, prompt: Any) -> bytes:
        """A prompt as bytes, packed once for all actors."""
        if prompt.id not in self._packed:
            self._packed[prompt.id] = pack(prompt.fields)
        return self._packed[prompt.id]

    def forget(self, prompt: Any) -> None:
        self._packed.pop(prompt.id, None)
        for driver in self._drivers:
            driver.forget(prompt.id)

    async def broadcast(self, method: str, *args: Any) -> None:
        packed = ray.put(args)
        await asyncio.gather(*(driver.call(method, packed) for driver in self._drivers))

    async def close(self) -> None:
        for driver in self._drivers:
            driver.close()


class _Driver:
    """The driver's side of one worker: an actor, and those that replace it."""

    def __init__(self, number: int, pool: RayPool) -> None:
        self._number = number
        self._pool = pool
        self._restarts = pool.restarts
        self._ids = itertools.count()
        self._calls: dict[str, Any] = {}  # the last broadcasts; a new actor gets them first
        self._loop = asyncio.get_running_loop()
        self.ready = asyncio.Event()  # set once the first actor takes sessions, or none can
        self._start_actor()
        self._task = self._loop.create_task(self._serve())

    def _start_actor(self) -> None:
        actor = ray.remote(Actor).options(**self._pool.options)
        self.actor: Any = actor.remote(self._pool.worker)
        self._up = False  # whether it takes sessions
        self._known: set[int] = set()
        self._forgotten: list[int] = []
        self._outbox: list[tuple[int, Job]] = []
        self._cancelled: list[int] = []
        self._timer: asyncio.Handle | None = None
        self._running: dict[int, Job] = {}
        self._asked = False  # whether its loop turns, and it has not answered

    async def _serve(self) -> None:
        """Run sessions in an actor until it ends, and in another one after that."""
        while self.actor is not None:
            cause = await self._serve_actor(self.actor)
            running, gone = self._running, self._restarts == 0
            text = "worker %d ended with %d sessions: %s%s"
            more = "" if gone else "; it is replaced"
            logger.warning(text, self._number, len(running), cause, more)
            ray.kill(self.actor)
            if self._timer is not None:
                self._timer.cancel()
            if gone:
                self.actor, self._running = None, {}
                self.ready.set()
            else:
                self._restarts -= 1
                self._start_actor()
            self._pool.changed(self._number, "lost" if gone else "away")
            for job in running.values():
                lost = WorkerLostError(f"worker {self._number} died: {cause}")
                self._pool.returned(job, error=lost)

    async def _serve_actor(self, actor: Any) -> str:
        """Take an actor's results until it ends; returns why it did."""
        repeated: dict[str, Any] = {}
        try:
            try:
                await asyncio.wait_for(actor.hello.remote(), START_S)
            except asyncio.TimeoutError:
                self._restarts = 0
                has = await self._pool.resources()
                return f"Ray did not place it within {START_S:g} s; there is: {has}"
            while todo := {m: p for m, p in self._calls.items() if repeated.get(m) is not p}:
                for method, packed in todo.items():
                    await actor.call.remote(method, packed)
                repeated.update(todo)
            self._up = True
            self.ready.set()
            self._pool.changed(self._number, "back")
            self._soon()
            while True:
                for number, packed in pickle.loads(await actor.results.remote()):
                    self._settle(number, packed and unpack(packed, "its result cannot be read"))
        except RayActorError as error:
            return " ".join(str(error).split())
        except Exception as error:  # a broadcast failed, or results cannot be read
            logger.exception("worker %d is given up", self._number)
            return f"{type(error).__name__}: {text_of(error)}"

    def start(self, job: Job) -> None:
        if self.actor is None:
            lost = WorkerLostError(f"worker {self._number} is lost")
            self._loop.call_soon(self._pool.returned, job, NOTHING, lost)
            return
        number = next(self._ids)
        self._running[number] = job
        self._outbox.append((number, job))
        self._soon()

    def stop(self, job: Job) -> None:
        if self.actor is None:
            return
        self._cancelled += [number for number, other in self._running.items() if other is job]
        self._soon()
        if self._up and not self._asked:
            self._asked = True
            self._loop.create_task(self._ask(self.actor))

    async def _ask(self, actor: Any) -> None:
        """End an actor whose event loop does not answer; another one replaces it."""
        try:
            await asyncio.wait_for(actor.hello.remote(), timeouts.ASK_S)
        except asyncio.TimeoutError:
            if self.actor is actor:
                logger.warning("worker %d blocks its event loop, and is replaced", self._number)
                ray.kill(actor)
        except Exception:  # it has died, which is noticed elsewhere
            pass
        if self.actor is actor:
            self._asked = False

    def forget(self, prompt: int) -> None:
        if prompt in self._known:
            self._known.discard(prompt)
            self._forgotten.append(prompt)

    async def call(self, method: str, packed: Any) -> None:
        self._calls[method] = packed
        if self._up:
            with contextlib.suppress(RayActorError):  # its successor gets the call first
                await self.actor.call.remote(method, packed)

    def close(self) -> None:
        self._task.cancel()
        if self.actor is not None:
            ray.kill(self.actor)
            self.actor = None

    def _soon(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(COALESCE_S, self._flush)

    def _flush(self) -> None:
        """Send what has gathered: sessions with the prompts they need, and cancellations."""
        self._timer = None
        if not self._up:
            return
        jobs, self._outbox = self._outbox, []
        cancelled, self._cancelled = self._cancelled, []
        forgotten, self._forgotten = self._forgotten, []
        prompts: dict[int, bytes] = {}
        sessions = []
        for number, job in jobs:
            prompt = job.group
            try:
                if prompt.id not in self._known:
                    prompts[prompt.id] = self._pool.packed(prompt)
                    self._known.add(prompt.id)
            except Exception as error:  # a prompt that cannot be sent
                self._settle(number, DataFailure(f"its prompt cannot be sent: {text_of(error)}"))
                continue
            sessions.append((number, prompt.id, prompt.sampling, _plain_session(job.session)))
        try:
            # As bytes: Ray would walk through a list of tuples in Python.
            self.actor.take.remote(pack((sessions, prompts, cancelled, forgotten)))
        except Exception as error:  # what cannot be sent
            for number, *_ in sessions:
                self._settle(number, as_failure(error))

    def _settle(self, number: int, result: Any) -> None:
        error = result if isinstance(result, SessionFailure) else None
        found = NOTHING if error or result is None else result
        self._pool.returned(self._running.pop(number), found, error)


# As attrs.astuple, which takes several times as long.
_plain_session = operator.attrgetter(*(field.name for field in attrs.fields(Session)))
