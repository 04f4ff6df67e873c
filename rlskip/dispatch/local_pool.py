"""The pool of this process: each worker on an event loop and a thread of its own."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from rlskip.dispatch import timeouts
from rlskip.dispatch.failures import InfrastructureFailure
from rlskip.dispatch.pools import THREADS, Pool, Runner, Worker, is_blocking
from rlskip.dispatch.scheduler import Job
from rlskip.dispatch.timeouts import LoopThread, Mailbox, settle

logger = logging.getLogger(__name__)


class LocalPool(Pool):
    """Workers in this process.

    Each worker has an event loop and a thread of its own: what it cancels or blocks costs the
    sessions that run on it, by their deadline. Then another one takes its place, which gets the
    last broadcasts first. A `worker` is an async function, a blocking one, or a class with
    ``__call__`` (or a partial of it). Each call of a blocking one has a thread more: a worker runs
    as many `threads` at once, besides those that were given up and have not returned.
    """

    def __init__(self, worker: Worker, workers: int = 4, *, threads: int = THREADS) -> None:
        super().__init__(workers)
        self.slots = threads if is_blocking(worker) else None
        self._make = functools.partial(Runner, worker)
        self._runners = [self._make() for _ in range(self.workers)]
        self._homes: list[_Home] = []  # of the workers
        self._calls: dict[str, tuple[Any, ...]] = {}  # the last broadcasts

    async def open(self) -> None:
        results = Mailbox(asyncio.get_running_loop())
        for _ in self._runners:  # one by one: what was made is closed if the next cannot be
            self._homes.append(_Home(results, self._ended))

    def start(self, job: Job) -> None:
        run = self._runners[job.worker].run
        self._homes[job.worker].run(job, run, job.group.fields, job.group.sampling, job.session)

    def _ended(self, ended: Job | asyncio.Future[Any], result: Any, error: Any) -> None:
        if isinstance(ended, Job):
            self.done(ended, result, error)
        else:
            settle(ended, result, error)

    def stop(self, job: Job) -> None:
        """Cancel a session, and replace its worker if that does not turn its event loop."""
        worker, home = job.worker, self._homes[job.worker]
        home.cancel(job)
        if home.asked:
            return
        home.ask()

        def look() -> None:
            if home.asked and self._homes[worker] is home:
                logger.warning("worker %d blocks its event loop, and is replaced", worker)
                home.close()
                self._runners[worker] = runner = self._make()
                first = [functools.partial(runner.call, m, *a) for m, a in self._calls.items()]
                self._homes[worker] = _Home(home.results, self._ended, first)

        asyncio.get_running_loop().call_later(timeouts.TURN_S, look)

    async def broadcast(self, method: str, *args: Any) -> None:
        self._calls[method] = args
        loop = asyncio.get_running_loop()
        calls = [loop.create_future() for _ in self._runners]
        for home, runner, call in zip(self._homes, self._runners, calls, strict=True):
            home.run(call, runner.call, method, *args)
        await asyncio.gather(*calls)

    async def close(self) -> None:
        for home in self._homes:
            home.close()


Call = Callable[..., Coroutine[Any, Any, Any]]


class _Home(LoopThread):
    """The thread and the event loop of a worker.

    `ended` is called on the event loop of `results`, with what :meth:`run` was told to await, its
    result and its error. The calls `first` come before its first session.
    """

    # Whatever code of the user's does here, it sees the tasks of this worker only, and ends no
    # thread but this one, which goes on.

    def __init__(
        self, results: Mailbox, ended: Callable[..., None], first: Sequence[Call] = ()
    ) -> None:
        super().__init__("rlskip-worker")
        self.results = results
        self._tell = ended
        self.asked = False  # whether its loop turns, and it has not answered
        self._outbox: list[tuple[Any, Call | None, tuple[Any, ...]]] = []
        self._tasks: dict[Any, asyncio.Task[Any]] = {}
        self._first: asyncio.Future[Any] | None = None
        if first:
            self.post(self._open, first)

    def run(self, what: Any, call: Call, *args: Any) -> None:
        """Await ``call(*args)`` here, and tell that `what` has ended."""
        self._send(what, call, args)

    def cancel(self, what: Any) -> None:
        """Cancel a call."""
        self._send(what, None, ())

    def _send(self, what: Any, call: Call | None, args: tuple[Any, ...]) -> None:
        # What is sent in one turn of the dispatcher's loop goes together: the other thread runs
        # meanwhile, and would have to be woken for each.
        if not self._outbox:
            self.results.loop.call_soon(self._flush)
        self._outbox.append((what, call, args))

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

    def _make_all(self, calls: Sequence[tuple[Any, Call | None, tuple[Any, ...]]]) -> None:
        for what, call, args in calls:
            if call is None:
                if what in self._tasks:
                    self._tasks[what].cancel()
                continue
            coroutine = call(*args) if self._first is None else self._after_first(call, *args)
            task = self._tasks[what] = self.loop.create_task(coroutine)
            task.add_done_callback(functools.partial(self._ended, what))

    async def _after_first(self, call: Call, *args: Any) -> Any:
        assert self._first is not None
        await asyncio.wait([self._first])
        return await call(*args)

    def _ended(self, what: Any, task: asyncio.Task[Any]) -> None:
        del self._tasks[what]
        cancelled = InfrastructureFailure("cancelled") if task.cancelled() else None
        error = cancelled or task.exception()
        self.results.post(self._tell, what, None if error else task.result(), error)
