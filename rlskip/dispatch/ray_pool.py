"""RayPool: every worker is an actor. Sessions and results travel in batches."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import torch
from ray import cloudpickle
from ray.exceptions import RayActorError

from rlskip.batch.columns import own
from rlskip.dispatch import timeouts
from rlskip.dispatch.pools import THREADS, Ended, Pool, Runner, Worker
from rlskip.dispatch.scheduler import Job
from rlskip.dispatch.sessions import (
    DataFailure,
    InfrastructureFailure,
    SessionFailure,
    as_failure,
    text_of,
)

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

    passing = (RayActorError,)

    def __init__(
        self,
        worker: Worker,
        workers: int = 4,
        *,
        threads: int = THREADS,
        options: Mapping[str, Any] | None = None,
        restarts: int = 3,
    ) -> None:
        super().__init__(worker, workers, threads, restarts)
        usual = {"max_concurrency": 10_000, "scheduling_strategy": "SPREAD"}
        self.options = {**usual, **(options or {})}

    async def open(self, groups: Any) -> None:
        """Start Ray, and all actors; the error names what was asked of it, and what it has."""
        try:
            await asyncio.wait_for(self._open(groups), timeouts.START_S)
        except asyncio.TimeoutError as error:
            what = "Ray did not start all actors" if ray.is_initialized() else "Ray did not start"
            needs = {"num_cpus": 1, **self.options}  # as Ray places an actor
            each = ", ".join(f"{k}={v}" for k, v in needs.items() if k != "max_concurrency")
            raise InfrastructureFailure(
                f"{what} within {timeouts.START_S:g} s. Asked for: {self.workers} actors, each "
                f"with {each}. There is: {await resources()}",
                "dispatch.workers",
                "set fewer workers, ask less for each (RayPool(options=...)), or give Ray more; "
                "`ray status` says what waits",
            ) from error

    async def _open(self, groups: Any) -> None:
        if not ray.is_initialized():

            async def start() -> None:
                ray.init()

            # On a thread that stays: Ray's processes end with the thread that started them.
            await asyncio.wrap_future(timeouts.LoopThread("rlskip-ray").ask(start))
        await super().open(groups)

    def _make(self, number: int) -> _Driver:
        return _Driver(number, self)

    async def broadcast(self, method: str, *args: Any) -> None:
        await super().broadcast(method, ray.put(args))  # once for all actors

    def forget(self, prompt: Any) -> None:
        prompt.packed = None
        for driver in self._there.values():
            driver.forget(prompt.id)


async def resources() -> str:
    """What Ray has, and what of it is free."""
    asked = timeouts.in_thread(lambda: (ray.cluster_resources(), ray.available_resources()))
    if await timeouts.failure_of(asked, timeouts.ASK_S, "Ray") is not None:
        return "unknown (Ray does not answer)"
    has, free = asked.result()
    named = {k: v for k, v in has.items() if not k.startswith(("node:", "object_store"))}
    return ", ".join(f"{k}={v:g} ({free.get(k, 0):g} free)" for k, v in sorted(named.items()))


class _Driver:
    """The driver's side of an actor."""

    def __init__(self, number: int, pool: RayPool) -> None:
        self._number = number
        self._pool = pool
        self._actor: Any = ray.remote(Actor).options(**pool.options).remote(pool.worker)
        self._known: set[int] = set()  # the prompts that it has
        self._running: dict[tuple[int, int], Job] = {}  # by session and attempt
        self._message: list[tuple[Any, ...]] = []  # what it is told next: methods and arguments

    async def ready(self) -> None:
        placed = asyncio.ensure_future(self._actor.hello.remote())
        if error := await timeouts.failure_of(placed, timeouts.START_S, "Ray, asked to place it,"):
            ray.kill(self._actor)
            raise error

    def serve(self) -> None:
        self._task = asyncio.ensure_future(self._take_results())

    async def _take_results(self) -> None:
        try:
            while True:
                for key, packed in pickle.loads(await self._actor.results.remote()):
                    self._settle(key, packed and unpack(packed, "its result cannot be read"))
        except Exception as error:  # it died, or results cannot be read
            self._pool.ended(self._number, self, error)

    def start(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            prompt, key = job.group, (job.number, job.attempt)
            self._running[key] = job
            if prompt.id not in self._known:
                try:
                    prompt.packed = prompt.packed or pack(prompt.fields)  # once for all actors
                except Exception as error:
                    self._settle(key, DataFailure(f"its prompt cannot be sent: {text_of(error)}"))
                    continue
                self._known.add(prompt.id)
                self._tell("know", prompt.id, prompt.packed)
            self._tell("start_known", key, prompt.id, prompt.sampling, job.session)

    def stop(self, job: Job) -> None:
        self._tell("stop", (job.number, job.attempt))

    def forget(self, prompt: int) -> None:
        if prompt in self._known:
            self._known.discard(prompt)
            self._tell("forget", prompt)

    async def call(self, method: str, args: tuple[Any, ...]) -> None:
        await self._actor.call.remote(method, *args)

    async def failure(self) -> Exception | None:
        turn = asyncio.ensure_future(self._actor.hello.remote())
        return await timeouts.failure_of(turn, timeouts.ASK_S, "its event loop")

    def close(self) -> None:
        ray.kill(self._actor)

    def _tell(self, method: str, *args: Any) -> None:
        """Call a method of the actor in a moment, with what else has gathered by then."""
        if not self._message:
            asyncio.get_running_loop().call_later(COALESCE_S, self._flush)
        self._message.append((method, *args))

    def _flush(self) -> None:
        message, self._message = self._message, []
        try:
            # As bytes: Ray would walk through a list of tuples in Python.
            self._actor.take.remote(pack(message))
        except Exception as error:  # what cannot be sent
            for method, key, *_ in message:
                if method == "start_known":
                    self._settle(key, as_failure(error))

    def _settle(self, key: tuple[int, int], result: Any) -> None:
        self._pool.groups.returned([(self._running.pop(key), result)])


class Actor(Runner):
    """The actor's side: runs sessions, and returns their results when asked."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker, self._keep)
        self._prompts: dict[int, Any] = {}
        self._results: list[tuple[Any, bytes | None]] = []
        self._some = asyncio.Event()

    async def hello(self) -> None: ...

    async def take(self, message: bytes) -> None:
        for method, *args in pickle.loads(message):
            getattr(self, method)(*args)

    def know(self, prompt: int, fields: bytes) -> None:
        self._prompts[prompt] = unpack(fields, "its prompt cannot be read in the actor")

    def start_known(self, key: Any, prompt: int, sampling: Any, session: Any) -> None:
        if isinstance(fields := self._prompts[prompt], SessionFailure):
            self._keep([(key, fields)])
        else:
            self.start(key, fields, sampling, session)

    def forget(self, prompt: int) -> None:
        self._prompts.pop(prompt, None)

    def _keep(self, ended: Sequence[Ended]) -> None:
        for key, result in ended:
            if isinstance(result, SessionFailure):
                # Its kind and its text: any process can load these, whatever its class is.
                is_machine = isinstance(result, InfrastructureFailure)
                result = (InfrastructureFailure if is_machine else DataFailure)(text_of(result))
            try:
                # None is as short as what most workers of verl's return.
                packed = None if result is None else pack(result)
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
        await super().call(method, own(args))


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
