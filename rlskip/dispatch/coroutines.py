"""Coroutines of the dispatcher, which its own answers resume, and not tasks of the event loop.

Workers share the event loop. Code of theirs may cancel every task that it finds there
(``for task in asyncio.all_tasks(): task.cancel()``), as clean-up code of frameworks does. A
coroutine that :func:`run` runs is not a task: no worker sees it, and nothing but the answer that it
awaits resumes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

import attrs

from rlskip.dispatch.failures import InfrastructureFailure

T = TypeVar("T")


@attrs.define(eq=False)
class Answer(Generic[T]):
    """A result that one coroutine awaits.

    It is set once, on the event loop; a later result is ignored. Setting it resumes the
    coroutine at once, within the call.
    """

    done: bool = attrs.field(default=False, init=False)
    _value: T | None = attrs.field(default=None, init=False)
    _error: BaseException | None = attrs.field(default=None, init=False)
    _coroutine: Coroutine[Answer[Any], None, None] | None = attrs.field(default=None, init=False)

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


async def failure_of(future: asyncio.Future[Any], seconds: float, what: str) -> Exception | None:
    """Why a future of the event loop failed, or that `what` did not answer within `seconds`.

    None once it has a result. A future that takes longer is not cancelled.
    """
    answer: Answer[object] = Answer()
    timer = future.get_loop().call_later(seconds, answer.set, None)
    future.add_done_callback(answer.set)
    await answer
    timer.cancel()
    if not future.done():
        return InfrastructureFailure(f"{what} did not answer within {seconds:g} s")
    return future.exception()  # type: ignore[return-value]
