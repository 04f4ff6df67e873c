"""Pools: where sessions run. The contract, and the workers of this process.

A worker is what a user brings, and there is nothing to subclass: an async function, a blocking
one (it runs in a thread), or a class with ``__call__``, made once per worker. It is called as
``worker(prompt, sampling, session)`` with the prompt's fields (a copy of its own), the
sampling parameters and the :class:`~rlskip.dispatch.Session`, and returns one row or a list of
rows, each a mapping of fields. It may return None instead when it has written its rows to the
queue itself, under ``session.key(i)`` with ``session.tag()``.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlskip.dispatch.failures import DataFailure
from rlskip.dispatch.units import Job, Sample, Session, own

Worker = Callable[..., Any]
Rows = list[dict[str, Any]] | None

THREADS = 16
"""How many blocking functions a worker runs at once, where nobody says."""


class Pool(ABC):
    """Workers ``0 .. workers-1``; every call comes from one event loop."""

    #: How many sessions a worker can really run at once; None for any number. More are not
    #: handed out, so that none waits where its deadline runs already.
    slots: int | None = None

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"a pool needs at least one worker, got {workers}")
        self.workers = workers

    async def open(self) -> None:  # noqa: B027 - may do nothing
        """Make the workers; called once, before anything else."""

    @abstractmethod
    def start(self, worker: int, job: Job) -> asyncio.Future[Rows]:
        """Run a session. The future ends with its rows, what it raised, or WorkerLostError."""

    @abstractmethod
    def stop(self, worker: int, future: asyncio.Future[Rows]) -> None:
        """Stop a session; its future ends all the same, with its rows where it was too late."""

    def forget(self, sample: Sample) -> None:  # noqa: B027 - may do nothing
        """No session of this prompt will be run any more."""

    @abstractmethod
    async def broadcast(self, method: str, *args: Any) -> None:
        """Call a method of every worker, a new policy's weights its argument, say."""

    async def close(self) -> None:  # noqa: B027 - may do nothing
        """Let the workers go; what runs is abandoned."""


class LocalPool(Pool):
    """Workers in this process: coroutines of the dispatcher's event loop, or threads.

    Parameters
    ----------
    worker
        An async function, a blocking one, or a class with ``__call__`` (or a partial of it).
    workers
        How many.
    threads
        For blocking functions: how many of them a worker runs at once.
    """

    def __init__(self, worker: Worker, workers: int = 4, *, threads: int = THREADS) -> None:
        super().__init__(workers)
        self.slots = threads if is_blocking(worker) else None
        self._runners = [Runner(worker, threads) for _ in range(workers)]

    def start(self, worker: int, job: Job) -> asyncio.Future[Rows]:
        run = self._runners[worker].run(job.sample.fields, job.sampling, job.session)
        return asyncio.get_running_loop().create_task(run)

    def stop(self, worker: int, future: asyncio.Future[Rows]) -> None:
        future.cancel()

    async def broadcast(self, method: str, *args: Any) -> None:
        for runner in self._runners:
            await runner.call(method, *args)

    async def close(self) -> None:
        for runner in self._runners:
            runner.close()


class Runner:
    """One worker, wherever it lives: calls what the user brought, and checks what it returns."""

    def __init__(self, worker: Worker, threads: int) -> None:
        made = worker.func if isinstance(worker, functools.partial) else worker
        self._worker = worker() if inspect.isclass(made) else worker
        self._blocking = is_blocking(worker)
        self._threads = ThreadPoolExecutor(threads, "rlskip-worker") if self._blocking else None

    async def run(
        self, fields: Mapping[str, Any], sampling: Mapping[str, Any], session: Session
    ) -> Rows:
        # Copies: sessions of one prompt share nothing, so none depends on where another ran.
        args = own(dict(fields)), own(dict(sampling)), session
        try:
            if not self._blocking:
                return as_rows(await self._worker(*args))
            loop = asyncio.get_running_loop()
            thread = loop.run_in_executor(self._threads, self._worker, *args)
            try:
                return as_rows(await asyncio.shield(thread))
            except asyncio.CancelledError:
                return as_rows(await thread)  # a thread cannot be stopped
        except (SystemExit, KeyboardInterrupt) as error:
            # Out of a task these end the event loop, and with it every other session.
            raise DataFailure(f"the worker raised {type(error).__name__}: {error}") from error

    async def call(self, method: str, *args: Any) -> None:
        result = getattr(self._worker, method)(*args)
        if inspect.isawaitable(result):
            await result

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def is_blocking(worker: Worker) -> bool:
    """Whether a call of `worker` holds the thread it is made in until it is done."""
    call = worker
    while isinstance(call, functools.partial):
        call = call.func
    if not inspect.isroutine(call):
        call = call.__call__ if inspect.isclass(call) else type(call).__call__
    return not inspect.iscoroutinefunction(call)


def as_rows(result: Any) -> Rows:
    """What a worker returned, as rows; raises DataFailure when it is none of what it may be."""
    if result is None:
        return None
    rows = [result] if isinstance(result, Mapping) else result
    if not isinstance(rows, (list, tuple)) or not all(isinstance(row, Mapping) for row in rows):
        raise DataFailure(
            f"the worker returned a {type(result).__name__}",
            remedy="return one row (a mapping of fields), a list of rows, or None",
        )
    if not rows:
        raise DataFailure("the worker returned no trajectory")
    return [dict(row) for row in rows]
