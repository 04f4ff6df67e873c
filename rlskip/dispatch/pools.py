"""Pools: where sessions run, and what a worker is and returns.

A worker is called as ``worker(prompt, sampling, session)`` with its own copy of the prompt's
fields, the sampling parameters and the :class:`~rlskip.dispatch.Session`, and returns one row or a
list of rows, each a mapping of fields; or None, when it has written its rows to the queue itself.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import is_non_tensor, is_tensor_collection

from rlskip.batch.columns import own
from rlskip.dispatch import timeouts
from rlskip.dispatch.scheduler import Job, SessionGroup
from rlskip.dispatch.sessions import (
    NOTHING,
    DataFailure,
    InfrastructureFailure,
    Returned,
    Session,
    as_failure,
    text_of,
)
from rlskip.dispatch.timeouts import LoopThread, in_thread
from rlskip.keys import integer
from rlskip.queue.protocol import OwnRow

Worker = Callable[..., Any]

THREADS = 16
"""The number of blocking calls that a worker runs at once by default."""

logger = logging.getLogger(__name__)


class Pool(ABC):
    """Workers ``0 .. workers-1``; every call comes from one event loop and must not block it."""

    def __init__(self, worker: Worker, workers: int, threads: int) -> None:
        if (number := integer(workers)) is None or number < 1:
            raise ValueError(f"a pool needs at least one worker, got {workers!r:.80}")
        self.workers = number
        self.worker = worker
        # How many sessions a worker is assigned at once, so that none waits while its deadline
        # runs; None: any number.
        self.slots = threads if is_blocking(worker) else None

    @abstractmethod
    async def open(self, groups: Any) -> None:
        """Make the workers; the groups of a dispatcher are told how sessions and workers end."""

    @abstractmethod
    def start(self, job: Job) -> None:
        """Run a session; that of a worker that died has a WorkerLostError."""

    @abstractmethod
    def stop(self, job: Job) -> None:
        """Stop a session, as far as it can be, and replace a worker that does not answer."""

    def forget(self, prompt: SessionGroup) -> None:  # noqa: B027 - may do nothing
        """No more sessions of this prompt will run."""

    @abstractmethod
    async def broadcast(self, method: str, *args: Any) -> None:
        """Call a method of every worker, e.g. to load a new policy's weights."""

    @abstractmethod
    async def close(self) -> None:
        """Release the workers; the sessions that run are abandoned."""


class LocalPool(Pool):
    """Workers in this process.

    Each worker has an event loop and a thread of its own: what it cancels or blocks costs the
    sessions that run on it, by their deadline. Then another one takes its place, which gets the
    last broadcasts first. A `worker` is an async function, a blocking one, or a class with
    ``__call__`` (or a partial of it), made once a worker. A blocking one runs as many `threads` at
    once, besides those that were given up and have not returned.
    """

    def __init__(self, worker: Worker, workers: int = 4, *, threads: int = THREADS) -> None:
        super().__init__(worker, workers, threads)
        self._threads: list[_Thread] = []  # of the workers
        self._calls: dict[str, tuple[Any, ...]] = {}  # the last broadcasts

    async def open(self, groups: Any) -> None:
        self._tell = functools.partial(groups.host.post, groups.returned)
        self._threads = [_Thread(self.worker, {}, self._tell) for _ in range(self.workers)]
        await asyncio.gather(*(asyncio.wrap_future(thread.made) for thread in self._threads))

    def start(self, job: Job) -> None:
        self._threads[job.worker].send(job)

    def stop(self, job: Job) -> None:
        number, thread = job.worker, self._threads[job.worker]
        thread.send(job, stop=True)
        if thread.asked:
            return

        def look() -> None:
            if thread.asked and self._threads[number] is thread:
                logger.warning("worker %d blocks its event loop, and is replaced", number)
                thread.close()
                self._threads[number] = _Thread(self.worker, self._calls, self._tell)

        thread.asked = True
        thread.post(setattr, thread, "asked", False)
        asyncio.get_running_loop().call_later(timeouts.TURN_S, look)

    async def broadcast(self, method: str, *args: Any) -> None:
        self._calls[method] = args
        calls = [thread.ask(thread.call, method, args) for thread in self._threads]
        await asyncio.gather(*map(asyncio.wrap_future, calls))

    async def close(self) -> None:
        for thread in self._threads:
            thread.close()


class _Thread(LoopThread):
    """The thread and the event loop of a worker, which is made there and gets `calls` first.

    Whatever code of the user's does here, it sees the tasks of this worker only, and ends no
    thread but this one, which goes on. `tell` is called with sessions that have ended.
    """

    def __init__(
        self, worker: Worker, calls: Mapping[str, tuple[Any, ...]], tell: Callable[..., None]
    ) -> None:
        super().__init__("rlskip-worker")
        self.asked = False  # whether its loop turns, and it has not answered
        self._tell = tell
        self._outbox: list[tuple[Job, bool]] = []
        self.made = self.ask(self._make, worker, dict(calls))

    def send(self, job: Job, stop: bool = False) -> None:
        """Run a session, or stop it."""
        # What is sent in one turn of the dispatcher's loop goes together: the other thread runs
        # meanwhile, and would have to be woken for each.
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append((job, stop))

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        self.post(self._take, outbox)

    # -- on its thread -------------------------------------------------------------------------

    async def _make(self, worker: Worker, calls: Mapping[str, tuple[Any, ...]]) -> None:
        self._runner = Runner(worker, self._tell)
        for method, args in calls.items():
            await self._runner.call(method, args)

    def _take(self, jobs: list[tuple[Job, bool]]) -> None:
        if not self.made.done():
            self.made.add_done_callback(lambda _: self.post(self._take, jobs))
            return
        broken = self.made.exception()
        for job, stop in jobs:
            if broken is not None:
                self._tell(job, NOTHING, broken)
            elif stop:
                self._runner.stop(job)
            else:
                self._runner.start(job, job.group.fields, job.group.sampling, job.session)

    async def call(self, method: str, args: tuple[Any, ...]) -> None:
        """Call a method of the worker."""
        await asyncio.wrap_future(self.made)
        await self._runner.call(method, args)


class Runner:
    """One worker: runs sessions on the present event loop.

    Each has a `key`: `ended` is called with it once, and with what the session returned and its
    error, or None.
    """

    def __init__(self, worker: Worker, ended: Callable[..., object]) -> None:
        made = worker.func if isinstance(worker, functools.partial) else worker
        self._worker = worker() if inspect.isclass(made) else worker
        self._blocks = is_blocking(worker)
        self._ended = ended
        self._tasks: dict[Any, asyncio.Task[Returned]] = {}
        self._pid = os.getpid()

    def start(
        self, key: Any, fields: Mapping[str, Any], sampling: Mapping[str, Any], session: Session
    ) -> None:
        run = self._run(fields, sampling, session)
        task = self._tasks[key] = asyncio.get_running_loop().create_task(run)
        task.add_done_callback(functools.partial(self._end, key))

    def stop(self, key: Any) -> None:
        if key in self._tasks:
            self._tasks[key].cancel()

    def _end(self, key: Any, task: asyncio.Task[Returned]) -> None:
        del self._tasks[key]
        error = InfrastructureFailure("cancelled") if task.cancelled() else task.exception()
        self._ended(key, NOTHING if error else task.result(), error)

    async def _run(
        self, fields: Mapping[str, Any], sampling: Mapping[str, Any], session: Session
    ) -> Returned:
        # Copies: sessions of one prompt share nothing, so none depends on where another ran.
        args = own(dict(fields)), own(dict(sampling)), session
        try:
            if self._blocks:
                found: Returned = await in_thread(self._call, *args, name="rlskip-worker")
                return found
            return returned(await self._worker(*args))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            # It could end the event loop, or look like the end of the actor's task.
            raise as_failure(error)  # noqa: B904 - it is the error itself, or has it as its cause
        finally:
            self._end_child()

    def _call(self, *args: Any) -> Returned:
        try:
            return returned(self._worker(*args))
        finally:
            self._end_child()

    def _end_child(self) -> None:
        # A worker that forks may come back twice, or raise in the child. That shares the pipes that
        # wake the event loops of its parent, and must not go on from here.
        if os.getpid() != self._pid:
            os._exit(0)

    async def call(self, method: str, args: tuple[Any, ...]) -> None:
        """Call a method of the worker."""
        called = getattr(self._worker, method)
        result = await in_thread(called, *args) if self._blocks else called(*args)
        if inspect.isawaitable(result):
            await result


def is_blocking(worker: Worker) -> bool:
    """Whether a call of `worker` occupies its thread until it returns."""
    call = worker
    while isinstance(call, functools.partial):
        call = call.func
    if not inspect.isroutine(call):
        call = call.__call__ if inspect.isclass(call) else type(call).__call__
    return not inspect.iscoroutinefunction(call)


def returned(result: Any) -> Returned:
    """What a worker returned, as rows of its session's own; raises DataFailure if it is not valid.

    They are copies: the next session may write into the worker's buffers.
    """
    if result is None:
        return NOTHING
    rows = [result] if isinstance(result, Mapping) else result
    if not isinstance(rows, (list, tuple)) or not all(isinstance(row, Mapping) for row in rows):
        raise DataFailure(
            f"the worker returned a {type(result).__name__}",
            remedy="return one row (a mapping of fields), a list of rows, or None",
        )
    if not rows:
        raise DataFailure("the worker returned no trajectory")
    kept: list[dict[str, Any]] = []
    tokens = 0
    for i, row in enumerate(rows):
        try:
            kept.append(_kept(row))
            tokens += _tokens(kept[-1])
        except Exception as error:
            text = f"{type(error).__name__}: " if not isinstance(error, DataFailure) else ""
            raise DataFailure(f"row {i}: {text}{text_of(error)}") from error
    return kept, tokens


def _kept(row: Mapping[Any, Any]) -> OwnRow:
    kept = OwnRow()
    for name in row.keys():  # noqa: SIM118 - to iterate over a TensorDict gives its rows
        value = row[name]
        if not isinstance(name, str):
            raise DataFailure(f"the name {name!r:.80} of a field is not a string")
        if type(value) is torch.Tensor:  # as nearly always
            kept[name] = value.detach().clone()
            continue
        if is_tensor_collection(value) and not is_non_tensor(value):
            what = f"field {name!r} is a nested {type(value).__name__}; return its fields flat"
            raise DataFailure(what)
        try:
            kept[name] = own(value)
        except Exception as error:
            what = f"field {name!r} cannot be copied: {type(error).__name__}: {text_of(error)}"
            raise DataFailure(what) from error
    if not kept:
        raise DataFailure("it has no fields")
    return kept


def _tokens(row: Mapping[str, Any]) -> int:
    """The number of tokens that were generated, by the response mask, else by the responses."""
    mask, responses = row.get("response_mask"), row.get("responses")
    try:
        if mask is not None:
            return int(mask.sum() if hasattr(mask, "sum") else sum(mask))
        return 0 if responses is None else len(responses)
    except TypeError:  # fields of these names that hold something else
        return 0
