"""Deadlines for every wait of the dispatcher (docs/dispatch.md lists them), and threads for them.

Each call that may hang has a daemon thread of its own: a ThreadPoolExecutor's threads, which are
joined when the interpreter exits, would keep the process alive.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from rlskip.dispatch.sessions import InfrastructureFailure, NoAnswerError, portable

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

WRITE_S = 60.0  # for the queue, and for the disk of a journal
TURN_S = 1.0  # for a worker's event loop, after a session's deadline
ASK_S = 5.0  # the same under Ray
START_S = 280.0  # for Ray and all actors, placement groups included
OPEN_S = 300.0  # for starting workers, and for calling all of them
CLOSE_S = 20.0
EXIT_S = 2.0


def in_thread(call: Callable[..., _T], *args: Any, name: str = "rlskip") -> asyncio.Future[_T]:
    """Run ``call(*args)`` on a daemon thread; the future belongs to the running event loop.

    What the call raises becomes an Exception (:func:`portable`).
    """
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # a caller that gives it up leaves it as it is

    def work() -> None:
        try:
            future.set_result(None if _exiting else call(*args))
        except BaseException as raised:
            future.set_exception(portable(raised))

    thread = threading.Thread(target=work, name=name, daemon=True)
    _threads.add(thread)  # before it starts: the end of the process waits for it
    try:
        thread.start()
    except RuntimeError as error:  # there are too many
        future.set_exception(InfrastructureFailure(f"{error}"))
    return asyncio.wrap_future(future)


async def failure_of(future: asyncio.Future[Any], seconds: float, what: str) -> Exception | None:
    """Why a future failed, or that `what` did not answer within `seconds`; None: it has a result.

    A future that takes longer is not cancelled.
    """
    future.add_done_callback(_seen)
    await asyncio.wait([future], timeout=seconds)
    if not future.done():
        return NoAnswerError(f"{what} did not answer within {seconds:g} s")
    return future.exception()  # type: ignore[return-value]


def _seen(it: asyncio.Future[Any]) -> object:  # else asyncio logs it, if nobody waits any more
    return it.cancelled() or it.exception()


class LoopThread:
    """An event loop on a daemon thread of its own, which goes on whatever its code raises."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        _loops.add(self.loop)
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._awake = False
        self._closed = False
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)
        self.thread.start()

    def post(self, call: Callable[..., object], *args: Any) -> None:
        """Make a call there, after all that were posted before; those of a moment wake it once."""
        # The order of these lines and of `_drain` is important. Whoever sees `_awake` has appended
        # before `_drain` cleared it, so that `_drain` finds the call; whoever does not see it wakes
        # the loop, at worst once too often.
        self._calls.append((call, args))
        if not self._awake:
            self._awake = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._awake = False
        while self._calls:
            call, args = self._calls.popleft()
            try:
                call(*args)
            except BaseException:  # the other calls are made all the same
                logger.exception("rlskip: %r failed", call)

    def ask(self, call: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Await ``call(*args)`` there; returns a future of ``concurrent.futures``."""

        async def run() -> Any:
            try:
                return await call(*args)
            except BaseException as error:  # which nothing but the caller is to see
                asyncio.current_task().add_done_callback(_seen)  # type: ignore[union-attr]
                raise portable(error)  # noqa: B904 - it is the error itself, or has its cause

        return asyncio.run_coroutine_threadsafe(run(), self.loop)

    def within(self, seconds: float, call: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Await ``call(*args)`` there, for at most `seconds`."""
        running = self.ask(call, *args)
        if not wait([running], seconds).done:
            running.cancel()
            raise InfrastructureFailure(f"{call.__qualname__} took longer than {seconds:g} s")
        return running.result()

    def close(self) -> None:
        """Cancel what runs, and end the thread, as soon as nothing blocks it."""
        self._closed = True
        self.post(self.loop.stop)

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not (self._closed or self.loop.is_closed()):
            try:
                self.loop.run_forever()
            except BaseException:  # a task of a worker's own raised SystemExit, for example
                logger.exception("rlskip: the event loop of %s goes on", self.thread.name)
        with contextlib.suppress(BaseException):
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            turn = self.loop.create_task(asyncio.sleep(0))  # for callbacks of what has ended
            self.loop.run_until_complete(asyncio.wait({turn, *tasks}, timeout=1))
        with contextlib.suppress(BaseException):
            self.loop.close()


# Nothing of ours runs when the interpreter ends, on a loop or a thread: one that it stops within a
# C++ library, which frees tensors, say, aborts the process.
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
_exiting = False


@atexit.register
def _let_calls_end() -> None:
    """Begin no more calls, and wait briefly for those that run."""
    global _exiting
    _exiting = True
    stopped = []
    for loop in list(_loops):
        event = threading.Event()
        with contextlib.suppress(RuntimeError):  # it is closed
            loop.call_soon_threadsafe(_stop_here, event)
            stopped.append(event)
    deadline = time.monotonic() + EXIT_S
    for event in stopped:
        event.wait(max(0.0, deadline - time.monotonic()))
    for thread in list(_threads):
        if thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))


def _stop_here(stopped: threading.Event) -> None:
    stopped.set()
    threading.Event().wait()
