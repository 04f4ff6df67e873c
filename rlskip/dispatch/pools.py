"""Pools: where sessions run, and what a worker is and returns.

A worker is called as ``worker(prompt, sampling, session)`` with its own copy of the prompt's
fields, the sampling parameters and the :class:`~rlskip.dispatch.Session`, and returns one row or a
list of rows, each a mapping of fields; or None, when it has written its rows to the queue itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import math
import os
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from rlskip.batch.columns import own
from rlskip.dispatch import timeouts
from rlskip.dispatch.scheduler import Job
from rlskip.dispatch.sessions import (
    InfrastructureFailure,
    NoAnswerError,
    Result,
    Session,
    WorkerLostError,
    as_failure,
    returned,
    text_of,
)
from rlskip.keys import integer

Worker = Callable[..., Any]
Ended = tuple[Any, Result]  # a session's key, and its result

THREADS = 16  # the blocking calls that a worker runs at once by default

logger = logging.getLogger(__name__)


class Pool(ABC):
    """Workers ``0 .. workers-1``, each with an event loop of its own.

    Every call comes from the dispatcher's event loop, and must not block it. A worker that has
    ended, or whose event loop stands still, is replaced; its successor gets the last broadcasts
    before its first session.
    """

    groups: Any = None  # of the dispatcher that opened it: told how sessions and workers end
    passing: tuple[type[Exception], ...] = ()  # what keeps a successor, and not the next one

    def __init__(self, worker: Worker, workers: int, threads: int, restarts: float) -> None:
        for name, number in (("worker", workers), ("thread", threads)):
            if (integer(number) or 0) < 1:
                raise ValueError(f"a pool needs at least one {name}, got {number!r:.80}")
        self.workers = number = int(workers)
        self.worker = worker
        # How many sessions a worker is assigned at once, so that none waits while its deadline
        # runs; None: any number.
        self.slots = threads if is_blocking(worker) else None
        self._restarts = [restarts] * number  # of each that are left
        self._calls: dict[str, Any] = {}  # the last broadcasts
        self._made: list[Any] = []  # all workers that were made
        self._there: dict[int, Any] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}  # that look at a worker, or replace it

    @abstractmethod
    def _make(self, number: int) -> Any:
        """Make a worker, to be awaited by its method ``ready``."""

    async def open(self, groups: Any) -> None:
        """Make the workers."""
        # Nothing of an earlier dispatcher stays: its broadcasts, say, are not for these workers.
        self.groups, self._calls, self._made, self._tasks = groups, {}, [], {}
        await asyncio.gather(*map(self._hire, range(self.workers)))

    async def _hire(self, number: int) -> None:
        worker = self._make(number)
        self._made.append(worker)
        await worker.ready()
        told: dict[str, Any] = {}  # those that come meanwhile are among them
        while todo := {m: args for m, args in self._calls.items() if told.get(m) is not args}:
            for method, args in todo.items():
                await worker.call(method, args)
            told.update(todo)
        self._there[number] = worker
        worker.serve()

    def start(self, number: int, jobs: Sequence[Job]) -> None:
        """Run sessions on a worker; those of one that dies have a WorkerLostError."""
        # Together: a worker in this process runs meanwhile, and would have to be woken for each.
        self._there[number].start(jobs)

    def stop(self, job: Job) -> None:
        """Stop a session, as far as it can be, and replace a worker that does not answer."""
        if worker := self._there.get(number := job.worker):
            worker.stop(job)
            if number not in self._tasks:
                self._tasks[number] = asyncio.ensure_future(self._look(number, worker))

    async def _look(self, number: int, worker: Any) -> None:
        if isinstance(await worker.failure(), NoAnswerError):
            self.ended(number, worker, InfrastructureFailure("it blocks its event loop"))
        elif number in self._there:  # else it is being replaced
            self._tasks.pop(number, None)

    def ended(self, number: int, worker: Any, cause: Exception) -> None:
        """A worker is given up: its sessions fail, and another one takes its place."""
        if number in self._there and self._there[number] is worker:
            self._there.pop(number).close()
            why = " ".join(text_of(as_failure(cause)).split())
            logger.warning("rlskip: worker %d ended: %s", number, why)
            self.groups.worker_changed(number, WorkerLostError(f"worker {number} died: {why}"))
            self._tasks[number] = asyncio.ensure_future(self._replace(number))

    async def _replace(self, number: int) -> None:
        while number not in self._there and self._restarts[number] > 0:
            self._restarts[number] -= 1
            try:
                await self._hire(number)
            except Exception as error:
                logger.warning("rlskip: worker %d is not replaced: %s", number, text_of(error))
                if not isinstance(error, self.passing):
                    break
        self._tasks.pop(number, None)
        is_there = number in self._there
        self.groups.worker_changed(number, None if is_there else WorkerLostError("not replaced"))

    @property
    def is_lost(self) -> bool:
        """Whether no worker is there, or will be again."""
        return not (self._there or self._tasks)

    def forget(self, prompt: Any) -> None:  # noqa: B027 - may do nothing
        """No more sessions of this prompt will run."""

    async def broadcast(self, method: str, *args: Any) -> None:
        """Call a method of every worker, e.g. to load a new policy's weights."""
        before, self._calls = self._calls, {**self._calls, method: args}
        calls = (worker.call(method, args) for worker in self._there.values())
        for error in await asyncio.gather(*calls, return_exceptions=True):
            if error is not None and not isinstance(error, self.passing):
                self._calls = before  # else it would raise in each successor, which is kept out
                raise error

    async def close(self) -> None:
        """Release the workers; the sessions that run are abandoned."""
        self._there.clear()  # first: who ends now is not replaced
        for task in self._tasks.values():
            task.cancel()
        for worker in self._made:
            worker.close()


class LocalPool(Pool):
    """Workers in this process.

    Each worker has an event loop and a thread of its own: what it cancels or blocks costs the
    sessions that run on it. A `worker` is an async function, a blocking one, or a class with
    ``__call__`` (or a partial of it), made once a worker. A blocking one runs as many `threads` at
    once, besides those that were given up and have not returned.
    """

    def __init__(self, worker: Worker, workers: int = 4, *, threads: int = THREADS) -> None:
        super().__init__(worker, workers, threads, restarts=math.inf)

    def _make(self, number: int) -> _Local:
        return _Local(self)


class _Local(timeouts.LoopThread):
    """A worker on a thread.

    Whatever code of the user's does here, it sees the tasks of this worker only, and ends no
    thread but this one, which goes on.
    """

    def __init__(self, pool: LocalPool) -> None:
        super().__init__("rlskip-worker")
        self._pool = pool

    async def ready(self) -> None:
        async def make() -> Runner:
            return Runner(self._pool.worker, functools.partial(groups.host.post, groups.returned))

        groups = self._pool.groups
        self._runner: Runner = await asyncio.wrap_future(self.ask(make))

    def serve(self) -> None: ...

    def start(self, jobs: Sequence[Job]) -> None:
        self.post(self._start, jobs)

    def _start(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._runner.start(job, job.group.fields, job.group.sampling, job.session)

    def stop(self, job: Job) -> None:
        self.post(self._runner.stop, job)

    async def call(self, method: str, args: tuple[Any, ...]) -> None:
        await asyncio.wrap_future(self.ask(self._runner.call, method, args))

    async def failure(self) -> Exception | None:
        turn = asyncio.wrap_future(self.ask(asyncio.sleep, 0))
        return await timeouts.failure_of(turn, timeouts.TURN_S, "its event loop")


class Runner:
    """One worker: runs sessions on the present event loop.

    Each has a `key`: `ended` is told it once, with what the session returned or why it failed.
    """

    def __init__(self, worker: Worker, ended: Callable[[list[Ended]], object]) -> None:
        made = worker.func if isinstance(worker, functools.partial) else worker
        self._worker = worker() if inspect.isclass(made) else worker
        self._blocks = is_blocking(worker)
        self._ended = ended
        # What ends in a turn is told together, or who is told would be woken for each of them.
        self._untold: list[Ended] = []
        self._tasks: dict[Any, asyncio.Task[None]] = {}
        self._pid = os.getpid()

    def start(
        self, key: Any, fields: Mapping[str, Any], sampling: Mapping[str, Any], session: Session
    ) -> None:
        run = self._run(key, fields, sampling, session)
        run.send(None)  # as far as its `try`: a task that is cancelled before its turn ends it, too
        self._tasks[key] = asyncio.get_running_loop().create_task(run)

    def stop(self, key: Any) -> None:
        if key in self._tasks:
            self._tasks[key].cancel()

    async def _run(
        self, key: Any, fields: Mapping[str, Any], sampling: Mapping[str, Any], session: Session
    ) -> None:
        result: Result
        try:
            await _turn()
            # Copies: sessions of one prompt share nothing, so none depends on where another ran.
            args = own(fields), own(sampling), session
            if self._blocks:
                result = returned(await timeouts.in_thread(self._call, *args, name="rlskip-worker"))
            else:
                try:
                    rows = await self._worker(*args)
                finally:
                    self._end_child()  # before a lock, which may be held by a thread of its parent
                result = returned(rows)
        except asyncio.CancelledError:
            result = InfrastructureFailure("cancelled")
        except BaseException as raised:  # it could end the event loop
            result = as_failure(raised)
        del self._tasks[key]
        if not self._untold:
            with contextlib.suppress(RuntimeError):  # its event loop was closed
                asyncio.get_running_loop().call_soon(self._tell)
        self._untold.append((key, result))

    def _tell(self) -> None:
        untold, self._untold = self._untold, []
        self._ended(untold)

    def _call(self, *args: Any) -> Any:
        try:
            return self._worker(*args)
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
        result = await timeouts.in_thread(called, *args) if self._blocks else called(*args)
        if inspect.isawaitable(result):
            await result


@types.coroutine
def _turn() -> Generator[None, None, None]:
    """Wait for the next turn of the event loop, as ``asyncio.sleep(0)`` does in a task."""
    yield


def is_blocking(worker: Worker) -> bool:
    """Whether a call of `worker` occupies its thread until it returns."""
    call = worker
    while isinstance(call, functools.partial):
        call = call.func
    if not inspect.isroutine(call):
        call = call.__call__ if inspect.isclass(call) else type(call).__call__
    return not inspect.iscoroutinefunction(call)
