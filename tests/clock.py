"""Waits of tests: by time that passes only where somebody waits, by the real one, for a fork."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable


def eventually(happened: Callable[[], object], seconds: float = 60.0) -> bool:
    """Whether it happens within so many seconds of the real clock, in another thread or process."""
    deadline = time.monotonic() + seconds
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(happened())


def in_a_fork(act: Callable[[], object]) -> None:
    """Do it in a forked child, where it must not raise, and wait for its end."""
    child = multiprocessing.get_context("fork").Process(target=act)
    child.start()
    child.join(100)
    assert child.exitcode == 0


class MockClock:
    """Seconds that pass only while somebody waits; after trio's MockClock.

    A wait ends at once: it moves the clock to the next action that is due, or by its timeout. Code
    under test takes `clock` as its clock, and ``clock.sleep`` or ``clock.wait`` as its way to wait.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []
        self._actions: list[tuple[float, Callable[[], object]]] = []
        self._loops: list[asyncio.AbstractEventLoop] = []

    def __call__(self) -> float:
        return self.now

    def at(self, seconds: float, action: Callable[[], object]) -> None:
        """Do `action` at this time, or during the first wait after it."""
        self._actions.append((seconds, action))

    def every(self, seconds: float, action: Callable[[], object]) -> None:
        """Do `action` every so often from now on."""

        def again() -> None:
            action()
            self.every(seconds, action)

        self.at(self.now + seconds, again)

    def wait(self, timeout: float) -> None:
        """Let time pass until an action has been done, or by `timeout`."""
        self.waits.append(timeout)
        self._pass(self.now + timeout)

    def sleep(self, seconds: float) -> None:
        """Let so much time pass; do what is due meanwhile."""
        until = self.now + seconds
        while self._pass(until):
            pass

    def _pass(self, until: float) -> bool:
        """Move to the next action and do it; without one until then, to `until`: False."""
        due = min(self._actions, key=lambda planned: planned[0], default=None)
        if due is None or due[0] > until:
            self._move(until)
            return False
        self._actions.remove(due)
        self._move(max(self.now, due[0]))
        due[1]()
        return True

    def _move(self, now: float) -> None:
        self.now = now
        for loop in self._loops:
            loop.call_soon_threadsafe(lambda: None)  # its timers are looked at again

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """An event loop whose timers go by this clock; in the place of asyncio's."""
        loop = _Loop(self)
        self._loops.append(loop)
        return loop


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: MockClock) -> None:
        self._mock_clock = clock
        super().__init__()

    def time(self) -> float:
        return self._mock_clock()

    def close(self) -> None:
        if self in self._mock_clock._loops:
            self._mock_clock._loops.remove(self)
        super().close()
