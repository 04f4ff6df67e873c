"""Deadlines for every wait of the dispatcher, and daemon threads for calls that may hang.

===========================  ==========================================================
what may hang                the dispatcher waits
===========================  ==========================================================
an attempt at a session      ``dispatch.session_timeout_s``
a write to the queue,        ``dispatch.session_timeout_s``, but at least `WRITE_S[0]`
to the journal               and at most `WRITE_S[1]` seconds
``collect()``                ``replay.timeout_s``, with all that it waits for
a worker's event loop        `TURN_S` seconds after a session's deadline; then it is replaced
starting or calling workers  `OPEN_S` seconds
``close()``                  `CLOSE_S` seconds for markers, and as long for the workers
the end of the process       `EXIT_S` seconds
===========================  ==========================================================

Code that may hang (workers, the queue, the disk) runs on daemon threads: a thread that is joined
when the interpreter exits, as a ThreadPoolExecutor's are, would keep the process alive.
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
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import attrs

from rlskip.config.dispatch import DispatchConfig
from rlskip.dispatch.failures import InfrastructureFailure, portable

T = TypeVar("T")

logger = logging.getLogger(__name__)

WRITE_S = (5.0, 60.0)
TURN_S = 1.0
OPEN_S = 300.0
CLOSE_S = 20.0
EXIT_S = 2.0


def write_seconds(config: DispatchConfig) -> float:
    """How long a write to the queue or the journal may take."""
    least, most = WRITE_S
    seconds = config.session_timeout_s
    return most if seconds is None else min(max(seconds, least), most)


@attrs.define(eq=False)
class _Call:
    """How far a call is; it keeps nothing of what was given or returned."""

    started: bool = False
    ended: bool = False
    given_up: bool = False  # while it ran


class DaemonThreads:
    """Runs calls on up to `most` daemon threads, for an event loop."""

    # `pending` counts the calls that have not ended. `_given_up` counts those that run and were
    # given up; `_threads` does not count their threads.

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._queue: SimpleQueue[tuple[_Call, Callable[[], None]] | None] = SimpleQueue()
        self._calls: WeakKeyDictionary[asyncio.Future[Any], _Call] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._threads = 0
        self._given_up = 0
        self.pending = 0
        _all.add(self)

    def run(self, call: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Run ``call(*args)``; the future belongs to the running event loop.

        What the call raises becomes an Exception (:func:`portable`). A call whose future is
        cancelled before it has started is not made; one that has started goes on.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: Exception | None) -> None:
            if not future.done():
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)

        def work() -> None:
            result, error = None, None
            try:
                if not future.cancelled():
                    result = call(*args)
            except BaseException as raised:
                error = portable(raised)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, result, error)

        with self._lock:
            self.pending += 1
            try:
                self._grow()
            except RuntimeError as error:  # no thread can be started now
                if self._threads == 0:
                    self.pending -= 1
                    future.set_exception(InfrastructureFailure(f"{error}"))
                    return future
            made = self._calls[future] = _Call()
            self._queue.put((made, work))
        return future

    def give_up(self, future: asyncio.Future[Any]) -> None:
        """Nobody waits for a call: it is not made, or another thread takes its thread's place."""
        with self._lock:
            call = self._calls.get(future)
            if call is None:  # no thread could be started for it
                return
            if not call.started:
                future.cancel()
            elif not (call.ended or call.given_up):
                call.given_up = True
                self._given_up += 1
                self._threads -= 1
                with contextlib.suppress(RuntimeError):  # the next call tries again
                    self._grow()

    def _grow(self) -> None:
        """Start another thread, if there are too few for the calls that are awaited."""
        if self._threads < min(self.pending - self._given_up, self._most):
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
            self._threads += 1

    def close(self) -> None:
        """Let the threads end; calls that run are not interrupted."""
        with self._lock:
            for _ in range(self._threads):
                self._queue.put(None)

    def _work(self) -> None:
        while (taken := self._queue.get()) is not None:
            call, work = taken
            with self._lock:
                call.started = True
            if not _exiting:
                work()
            del taken, work  # and with it what the call was given, such as tensors
            with self._lock:
                self.pending -= 1
                call.ended = True
                if call.given_up:  # another thread has its place
                    self._given_up -= 1
                    return


class Mailbox:
    """Calls for an event loop from other threads; those of a moment wake it once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._awake = False

    def post(self, call: Callable[..., object], *args: Any) -> None:
        """Make a call there, after all that were posted before."""
        # The order of these lines and of `_drain` is important. Whoever sees `_awake` has appended
        # before `_drain` cleared it, so that `_drain` finds the call; whoever does not see it wakes
        # the loop, at worst once too often.
        self._calls.append((call, args))
        if not self._awake:
            self._awake = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._awake = False
        while self._calls:
            call, args = self._calls.popleft()
            try:
                call(*args)
            except BaseException:  # the other calls are made all the same
                logger.exception("%s failed", name_of(call))


async def failure_of(future: asyncio.Future[Any], seconds: float, what: str) -> Exception | None:
    """Why a future failed, or that `what` did not answer within `seconds`; None: it has a result.

    A future that takes longer is not cancelled.
    """
    await asyncio.wait([future], timeout=seconds)
    if not future.done():
        return InfrastructureFailure(f"{what} did not answer within {seconds:g} s")
    return future.exception()  # type: ignore[return-value]


def result_of(outcome: Future[T], seconds: float, call: Callable[..., object]) -> T:
    """The result of `call`; raises InfrastructureFailure if there is none after `seconds`."""
    if not wait([outcome], seconds).done:
        outcome.cancel()
        raise InfrastructureFailure(f"{name_of(call)} took longer than {seconds:g} s")
    return outcome.result()


def name_of(call: Callable[..., object]) -> str:
    """How errors name a function."""
    return getattr(call, "__qualname__", repr(call))


# Nothing of ours runs when the interpreter ends: a thread that it stops within a C++ library, which
# frees tensors, say, aborts the process.
_all: weakref.WeakSet[DaemonThreads] = weakref.WeakSet()
_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
_exiting = False


def stops_at_exit(loop: asyncio.AbstractEventLoop) -> asyncio.AbstractEventLoop:
    """An event loop that runs on a daemon thread, and calls nothing more at the process's end."""
    _loops.add(loop)
    return loop


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
    while time.monotonic() < deadline and not (
        all(event.is_set() for event in stopped)
        and not any(threads.pending for threads in list(_all))
    ):
        time.sleep(0.01)


def _stop_here(stopped: threading.Event) -> None:
    stopped.set()
    threading.Event().wait()
