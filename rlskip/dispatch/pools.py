"""Pools: where sessions run. The interface, and what a worker is and returns.

A worker is an async function, a blocking one (it runs in a thread), or a class with
``__call__``, made once per worker; there is no base class. It is called as ``worker(prompt,
sampling, session)`` with its own copy of the prompt's fields, the sampling parameters and the
:class:`~rlskip.dispatch.Session`, and returns one row or a list of rows, each a mapping of
fields. It returns None when it has written its rows to the queue itself, under
``session.key(i)`` with ``session.tag()``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import is_non_tensor, is_tensor_collection

from rlskip.batch.columns import own
from rlskip.dispatch.failures import DataFailure, portable
from rlskip.dispatch.scheduler import Job, SessionGroup
from rlskip.dispatch.sessions import Session
from rlskip.dispatch.timeouts import in_thread
from rlskip.keys import integer
from rlskip.queue.rows import OwnRow

Worker = Callable[..., Any]
Rows = list[dict[str, Any]] | None


THREADS = 16
"""The number of blocking calls that a worker runs at once by default."""


class Pool(ABC):
    """Workers ``0 .. workers-1``; every call comes from one event loop and must not block it."""

    # The number of sessions that a worker can run at once; None for any number. It is assigned no
    # more, so that no session waits while its deadline runs.
    slots: int | None = None

    # Set by who starts sessions here, and called on their event loop: with a worker and what
    # becomes of it, ``away`` (it is being replaced), ``back`` or ``lost``; and once for each
    # session, with what the worker returned, or with its error.
    changed: Callable[[int, str], None]
    done: Callable[[Job, Any, BaseException | None], None]

    def __init__(self, workers: int) -> None:
        if (number := integer(workers)) is None or number < 1:
            raise ValueError(f"a pool needs at least one worker, got {workers!r:.80}")
        self.workers = number

    async def open(self) -> None:  # noqa: B027 - may do nothing
        """Make the workers; called once, first."""

    @abstractmethod
    def start(self, job: Job) -> None:
        """Run a session, and tell `done`; of a worker that died, a WorkerLostError."""

    @abstractmethod
    def stop(self, job: Job) -> None:
        """Stop a session, as far as it can be; nobody waits for it any more."""

    def forget(self, prompt: SessionGroup) -> None:  # noqa: B027 - may do nothing
        """No more sessions of this prompt will run."""

    @abstractmethod
    async def broadcast(self, method: str, *args: Any) -> None:
        """Call a method of every worker, e.g. to load a new policy's weights."""

    async def close(self) -> None:  # noqa: B027 - may do nothing
        """Release the workers; the sessions that run are abandoned."""


class Runner:
    """One worker: makes it, calls it, and turns every error that it raises into an Exception."""

    def __init__(self, worker: Worker) -> None:
        made = worker.func if isinstance(worker, functools.partial) else worker
        self._worker = worker() if inspect.isclass(made) else worker
        self._blocks = is_blocking(worker)
        self._pid = os.getpid()

    async def run(
        self, fields: Mapping[str, Any], sampling: Mapping[str, Any], session: Session
    ) -> Any:
        # Copies: sessions of one prompt share nothing, so none depends on where another ran.
        args = own(dict(fields)), own(dict(sampling)), session
        if self._blocks:
            return await in_thread(self._call, *args, name="rlskip-worker")
        try:
            return kept(await self._worker(*args))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            # It could end the event loop, or look like the end of the actor's task.
            raise portable(error)  # noqa: B904 - it is the error itself, or has it as its cause
        finally:
            self._end_child()

    def _call(self, *args: Any) -> Any:
        try:
            return kept(self._worker(*args))
        finally:
            self._end_child()

    def _end_child(self) -> None:
        # A worker that forks may come back twice, or raise in the child. That shares the pipes that
        # wake the event loops of its parent, and must not go on from here.
        if os.getpid() != self._pid:
            os._exit(0)

    async def call(self, method: str, *args: Any) -> None:
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


_PLAIN = (torch.Tensor, np.ndarray, str, int, float, bytes, type(None))


def kept(result: Any) -> Any:
    """What a worker returned, copied: the next session may write into its buffers."""
    if type(result) is not dict and is_tensor_collection(result):
        return own(result)
    if isinstance(result, Mapping):
        row = {name: _kept(item) for name, item in dict(result).items()}
        plain = all(type(n) is str and isinstance(item, _PLAIN) for n, item in row.items())
        return OwnRow(row) if plain else row
    return [kept(row) for row in result] if isinstance(result, (list, tuple)) else result


def _kept(value: Any) -> Any:
    """A field, copied, if it can be: a queue says what it does not take."""
    if type(value) is torch.Tensor:  # as nearly always
        return (value.detach() if value.requires_grad else value).clone()
    with contextlib.suppress(Exception):
        return own(value)
    return value


def as_rows(result: Any, written: bool = True) -> Rows:
    """What a worker returned, as rows; raises DataFailure if it is not valid.

    `written`: whether it may have written them to a queue itself, and return None.
    """
    if type(result) is OwnRow and result:  # as nearly always: names and values are plain
        return [result]
    if result is None:
        if written:
            return None
        raise DataFailure(
            "the worker returned no rows, as one that writes them to a queue itself",
            remedy="return the rows; or submit() to a dispatcher that has the queue",
        )
    rows = [result] if isinstance(result, Mapping) else result
    if not isinstance(rows, (list, tuple)) or not all(isinstance(row, Mapping) for row in rows):
        raise DataFailure(
            f"the worker returned a {type(result).__name__}",
            remedy="return one row (a mapping of fields), a list of rows, or None",
        )
    if not rows:
        raise DataFailure("the worker returned no trajectory")
    for i, row in enumerate(rows):
        names = list(row.keys())  # to iterate over a TensorDict gives its rows
        if not names or not all(isinstance(name, str) for name in names):
            raise DataFailure(f"row {i} has no fields, or a name that is not a string")
        for name in names if type(row) is not OwnRow else ():  # which has plain values
            if is_tensor_collection(value := row[name]) and not is_non_tensor(value):
                what = f"field {name!r} of row {i} is a nested {type(value).__name__}"
                raise DataFailure(what, remedy="return its fields flat: no queue takes it")
    return [row if type(row) is OwnRow else dict(row) for row in rows]
