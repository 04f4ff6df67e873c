"""RayPool: every worker is an actor. Sessions and results travel in batches."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import pickle
from collections.abc import Mapping
from typing import Any

import ray
import torch
from ray import cloudpickle
from ray.exceptions import RayActorError

from rlskip.batch.columns import own
from rlskip.dispatch import timeouts
from rlskip.dispatch.pools import THREADS, Pool, Rows, Runner, Worker
from rlskip.dispatch.scheduler import Job
from rlskip.dispatch.sessions import (
    DataFailure,
    InfrastructureFailure,
    NoAnswerError,
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
        self._restarts = [restarts] * self.workers  # of each that are left
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
        self._drivers = {i: _Driver(i, self) for i in range(self.workers)}
        ready = asyncio.gather(*(driver.ready for driver in self._drivers.values()))
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
                f"{what} within {timeouts.START_S:g} s. Asked for: {self.workers} actors, each "
                f"with {each}. There is: {await resources()}",
                "dispatch.workers",
                "set fewer workers, ask less for each (RayPool(options=...)), or give Ray more; "
                "`ray status` says what waits",
            ) from error

    def replace(self, number: int, cause: BaseException) -> WorkerLostError:
        """A worker's actor has ended; returns what its sessions fail with."""
        self._restarts[number] -= 1
        if self._restarts[number] >= 0 and not isinstance(cause, NoAnswerError):
            self._drivers[number] = _Driver(number, self)
        else:
            del self._drivers[number]
            self.left.discard(number)
        self.groups.worker_changed(number, False)
        why = " ".join(text_of(as_failure(cause)).split())
        what = "replaced" if number in self.left else "lost"
        logger.warning("worker %d ended: %s; it is %s", number, why, what)
        return WorkerLostError(f"worker {number} died: {why}")

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
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._known: set[int] = set()  # the prompts that it has
        self._running: dict[tuple[int, int], Job] = {}  # by session and attempt
        self._message: list[tuple[Any, ...]] = []  # what it is told next: methods and arguments
        self._look: asyncio.Task[None] | None = None  # whether its event loop turns
        self._task = asyncio.ensure_future(self._serve())

    async def _serve(self) -> None:
        """Make it ready, and take its results until it ends."""
        try:
            placed = asyncio.ensure_future(self.actor.hello.remote())
            if error := await failure_of(placed, timeouts.START_S, "Ray, asked to place it,"):
                raise error
            await self._pool.catch_up(self.actor.call.remote)
            self.ready.set_result(None)
            self._pool.groups.worker_changed(self._number, True)
            while True:
                for key, packed in pickle.loads(await self.actor.results.remote()):
                    self._settle(key, packed and unpack(packed, "its result cannot be read"))
        except Exception as error:  # it died, a broadcast failed, or results cannot be read
            ray.kill(self.actor)
            if not self.ready.done():
                self.ready.set_exception(error)
                self.ready.exception()  # nobody else may look at it
            lost = self._pool.replace(self._number, error)
            for key in list(self._running):
                self._settle(key, lost)

    def start(self, job: Job) -> None:
        prompt = job.group
        key = job.number, job.attempt
        self._running[key] = job
        if prompt.id not in self._known:
            try:
                prompt.packed = prompt.packed or pack(prompt.fields)  # once for all actors
            except Exception as error:
                self._settle(key, DataFailure(f"its prompt cannot be sent: {text_of(error)}"))
                return
            self._known.add(prompt.id)
            self._tell("know", prompt.id, prompt.packed)
        self._tell("start", key, prompt.id, prompt.sampling, job.session)

    def stop(self, job: Job) -> None:
        self._tell("stop", (job.number, job.attempt))
        if self._look is None:
            self._look = asyncio.ensure_future(self._kill_blocked())

    async def _kill_blocked(self) -> None:
        """End an actor whose event loop does not answer; another one replaces it."""
        turn = asyncio.ensure_future(self.actor.hello.remote())
        if isinstance(await failure_of(turn, timeouts.ASK_S, "it"), NoAnswerError):
            logger.warning("worker %d blocks its event loop, and is replaced", self._number)
            ray.kill(self.actor)
        self._look = None

    def forget(self, prompt: int) -> None:
        if prompt in self._known:
            self._known.discard(prompt)
            self._tell("forget", prompt)

    async def call(self, method: str, args: Any) -> None:
        if self.ready.done():
            with contextlib.suppress(RayActorError):  # its successor gets the call first
                await self.actor.call.remote(method, args)

    def close(self) -> None:
        self._task.cancel()
        ray.kill(self.actor)

    def _tell(self, method: str, *args: Any) -> None:
        """Call a method of the actor in a moment, with what else has gathered by then."""
        if not self._message:
            asyncio.get_running_loop().call_later(COALESCE_S, self._flush)
        self._message.append((method, *args))

    def _flush(self) -> None:
        message, self._message = self._message, []
        try:
            # As bytes: Ray would walk through a list of tuples in Python.
            self.actor.take.remote(pack(message))
        except Exception as error:  # what cannot be sent
            for method, key, *_ in message:
                if method == "start":
                    self._settle(key, as_failure(error))

    def _settle(self, key: tuple[int, int], result: Any) -> None:
        failed = isinstance(result, SessionFailure)
        rows, error = (None, result) if failed else (result, None)
        self._pool.groups.returned(self._running.pop(key), rows, error)


class Actor:
    """The actor's side: runs sessions, and returns their results when asked."""

    def __init__(self, worker: Worker) -> None:
        self._runner = Runner(worker, self._ended)
        self._prompts: dict[int, Any] = {}
        self._results: list[tuple[Any, bytes | None]] = []
        self._some = asyncio.Event()

    async def hello(self) -> None: ...

    async def take(self, message: bytes) -> None:
        for method, *args in pickle.loads(message):
            getattr(self, f"_{method}")(*args)

    def _know(self, prompt: int, fields: bytes) -> None:
        self._prompts[prompt] = unpack(fields, "its prompt cannot be read in the actor")

    def _start(self, key: Any, prompt: int, sampling: Any, session: Any) -> None:
        if isinstance(fields := self._prompts[prompt], SessionFailure):
            self._ended(key, None, fields)
        else:
            self._runner.start(key, fields, sampling, session)

    def _stop(self, key: Any) -> None:
        self._runner.stop(key)

    def _forget(self, prompt: int) -> None:
        self._prompts.pop(prompt, None)

    def _ended(self, key: Any, rows: Rows | None, error: BaseException | None) -> None:
        packed = None  # as short as what most workers of verl's return
        try:
            if error is not None:
                # Its kind and its text: any process can load these, whatever its class is.
                is_machine = isinstance(as_failure(error), InfrastructureFailure)
                kind = InfrastructureFailure if is_machine else DataFailure
                packed = pack(kind(text_of(as_failure(error))))
            elif rows is not None:
                packed = pack(rows)
        except Exception as refused:  # each on its own, so that what cannot be sent fails alone
            packed = pack(DataFailure(f"its result cannot be sent: {text_of(refused)}"))
        self._results.append((key, packed))
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
