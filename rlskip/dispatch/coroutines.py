"""Coroutines of the dispatcher, which its own answers resume, and not tasks of the event loop.

Workers share the event loop. Code of theirs may cancel every task that it finds there
(``for task in asyncio.all_tasks(): task.cancel()``), as clean-up code of frameworks does. A
coroutine that :func:`run` runs is no task: no worker sees it, and nothing but the answer that it
awaits resumes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Answer(Generic[T]):
    """A result that one coroutine awaits.

    It is set once, on the event loop; a later result is ignored. Setting it resumes the
    coroutine at once, within the call.
    """

    __slots__ = ("_coroutine", "_error", "_value", "done")

    def __init__(self) -> None:
        self.done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._coroutine: Coroutine[Answer[Any], None, None] | None = None

    def set(self, value: T) -> None:
        """Resume the coroutine with a value."""
        if not self.done:
            self.done, self._value = True, value
            self._resume()

    def fail(self, error: BaseException) -> None:
        """Raise an error where the coroutine waits."""
        if not self.done:
            self.done, self._error = True, error
            self._resume()

    def _resume(self) -> None:
        if self._coroutine is not None:
            coroutine, self._coroutine = self._coroutine, None
            run(coroutine)

    def __await__(self) -> Generator[Answer[Any], None, T]:
        if not self.done:
            yield self
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


def run(coroutine: Coroutine[Answer[Any], None, None]) -> None:
    """Run a coroutine until it awaits an :class:`Answer`, which will go on with it.

    It awaits nothing else, and handles its own errors: what it raises, this raises.
    """
    try:
        answer = coroutine.send(None)
    except StopIteration:
        return
    answer._coroutine = coroutine


def within(
    loop: asyncio.AbstractEventLoop, seconds: float, future: asyncio.Future[Any]
) -> Answer[bool]:
    """Whether a future of the event loop is done within `seconds`; it is not cancelled if not."""
    answer: Answer[bool] = Answer()
    timer = loop.call_later(seconds, answer.set, False)

    def done(_: asyncio.Future[Any]) -> None:
        timer.cancel()
        answer.set(True)

    future.add_done_callback(done)
    return answer
