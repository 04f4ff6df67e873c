"""The pool of this process: each worker on an event loop and a thread of its own."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from rlskip.dispatch import timeouts
from rlskip.dispatch.failures import InfrastructureFailure
from rlskip.dispatch.pools import THREADS, Pool, Rows, Runner, Worker, is_blocking
from rlskip.dispatch.sessions import Job
from rlskip.dispatch.timeouts import LoopThread, Mailbox, settle

logger = logging.getLogger(__name__)


class LocalPool(Pool):
    """Workers in this process.

    Each worker has an event loop and a thread of its own: what it cancels or blocks costs the
    sessions that run on it, by their deadline. Then another one takes its place, which gets the
    last broadcasts first. Each call of a blocking worker has one more thread.

    Parameters
    ----------
    worker
        An async function, a blocking one, or a class with ``__call__`` (or a partial of it).
    workers
        The number of workers.
    threads
        The number of blocking calls that one worker runs at once, besides those that were given
        up and have not returned.
    """

    def __init__(self, worker: Worker, workers: int = 4, *, threads: int = THREADS) -> None:
        super().__init__(workers)
        self.slots = threads if is_blocking(worker) else None
        self._make = functools.partial(Runner, worker)
        self._runners = [self._make() for _ in range(workers)]
        self._homes: list[_Home] = []  # of the workers, from the first call on
        self._calls: dict[str, tuple[Any, ...]] = {}  # the last broadcasts

    def _home(self, worker: int) -> _Home:
        if not self._homes:
            results = Mailbox(asyncio.get_running_loop())
            self._homes = [_Home(results) for _ in self._runners]
        return self._homes[worker]

    def start(self, worker: int, job: Job) -> asyncio.Future[Rows]:
        run = self._runners[worker].run
        return self._home(worker).run(run, job.sample.fields, job.sampling, job.session)

    def stop(self, worker: int, future: asyncio.Future[Rows]) -> None:
        """Cancel a session, and replace its worker if that does not turn its event loop."""
        home = self._home(worker)
        home.cancel(future)
        if home.asked:
            return
        home.ask()

        def look() -> None:
            if home.asked and self._homes[worker] is home:
                logger.warning("worker %d blocks its event loop, and is replaced", worker)
                home.close()
                self._runners[worker] = runner = self._make()
                first = [functools.partial(runner.call, m, *a) for m, a in self._calls.items()]
                self._homes[worker] = _Home(home.results, first)

        asyncio.get_running_loop().call_later(timeouts.TURN_S, look)

    async def broadcast(self, method: str, *args: Any) -> None:
        self._calls[method] = args
        calls = [
            self._home(worker).run(runner.call, method, *args)
            for worker, runner in enumerate(self._runners)
        ]
        await asyncio.gather(*calls)

    async def close(self) -> None:
        for home in self._homes:
            home.close()


Call = Callable[..., Coroutine[Any, Any, Any]]


class _Home(LoopThread):
    """The thread and the event loop of a worker.

    Parameters
    ----------
    results
        Carries results to the dispatcher's event loop.
    first
        What must have been called before its first session.
    """

    # Whatever code of the user's does here, it sees the tasks of this worker only, and ends no
    # thread but this one, which goes on.

    def __init__(self, results: Mailbox, first: Sequence[Call] = ()) -> None:
        super().__init__("rlskip-worker")
        self.results = results
        self.asked = False  # whether its loop turns, and it has not answered
        self._outbox: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._tasks: dict[asyncio.Future[Any], asyncio.Task[Any]] = {}
        self._first: asyncio.Future[Any] | None = None
        if first:
            self.post(self._open, first)

    def run(self, call: Call, *args: Any) -> asyncio.Future[Any]:
        """Await ``call(*args)`` here; returns a future of the dispatcher's event loop."""
        future = self.results.loop.create_future()
        self._send(self._begin, future, call, *args)
        return future

    def cancel(self, future: asyncio.Future[Any]) -> None:
        """Cancel what settles this future."""
        self._send(self._cancel, future)

    def _send(self, call: Callable[..., object], *args: Any) -> None:
        # What is sent in one turn of the dispatcher's loop goes together: the other thread runs
        # meanwhile, and would have to be woken for each.
        if not self._outbox:
            self.results.loop.call_soon(self._flush)
        self._outbox.append((call, args))

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        self.post(self._make_all, outbox)

    def ask(self) -> None:
        """Set `asked` until the loop turns."""
        self.asked = True
        self.post(setattr, self, "asked", False)

    # -- on its thread -------------------------------------------------------------------------

    def _open(self, first: Sequence[Call]) -> None:
        calls = (self.loop.create_task(call()) for call in first)
        self._first = asyncio.gather(*calls, return_exceptions=True)

    def _make_all(self, calls: Sequence[tuple[Callable[..., object], tuple[Any, ...]]]) -> None:
        for call, args in calls:
            call(*args)

    def _begin(self, future: asyncio.Future[Any], call: Call, *args: Any) -> None:
        coroutine = call(*args) if self._first is None else self._after_first(call, *args)
        task = self._tasks[future] = self.loop.create_task(coroutine)
        task.add_done_callback(functools.partial(self._ended, future))

    async def _after_first(self, call: Call, *args: Any) -> Any:
        assert self._first is not None
        await asyncio.wait([self._first])
        return await call(*args)

    def _cancel(self, future: asyncio.Future[Any]) -> None:
        if future in self._tasks:
            self._tasks[future].cancel()

    def _ended(self, future: asyncio.Future[Any], task: asyncio.Task[Any]) -> None:
        del self._tasks[future]
        cancelled = InfrastructureFailure("cancelled") if task.cancelled() else None
        error = cancelled or task.exception()
        self.results.post(settle, future, None if error else task.result(), error)
