"""The side of a RayPool in its actors, and values on their way there and back."""

from __future__ import annotations

import asyncio
import contextlib
import io
import pickle
from typing import Any

import torch
from ray import cloudpickle

from rlskip.batch.columns import own
from rlskip.dispatch.failures import (
    DataFailure,
    InfrastructureFailure,
    SessionFailure,
    as_failure,
    bare,
    text_of,
)
from rlskip.dispatch.pools import Runner, Worker
from rlskip.dispatch.sessions import Session

COALESCE_S = 0.002
"""Seconds that a session or a result waits for others to travel with it."""


class _Pickler(cloudpickle.Pickler):
    """Tensors go as numpy arrays: torch's own way through torch.save takes twenty times longer."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor:
            with contextlib.suppress(TypeError, RuntimeError):  # numpy has not all kinds of tensors
                return torch.from_numpy, (value.numpy(),)
        return super().reducer_override(value)


def pack(value: Any) -> bytes:
    """Pickle `value` for another process of the same run."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def unpack(packed: bytes, failed: str) -> Any:
    """The pickled value, or a failure if it cannot be unpickled in this process."""
    try:
        return pickle.loads(packed)
    except Exception as error:
        return DataFailure(f"{failed}: {text_of(error)}")


def sendable(result: Any) -> bytes:
    """`result`, pickled on its own, so that one that cannot be sent fails alone."""
    try:
        return pack(result)
    except Exception as error:
        return pack(DataFailure(f"its result cannot be sent: {text_of(error)}"))


class Actor:
    """The actor's side: runs sessions, and returns their results when asked."""

    def __init__(self, worker: Worker) -> None:
        self._runner = Runner(worker)
        self._prompts: dict[int, Any] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._results: list[tuple[int, bytes | None]] = []
        self._some = asyncio.Event()

    async def hello(self) -> None:
        pass

    async def take(self, packed: bytes) -> None:
        sessions, prompts, cancelled, forgotten = pickle.loads(packed)
        for key, fields in prompts.items():
            self._prompts[key] = unpack(fields, "its prompt cannot be read in the actor")
        for number, prompt, sampling, session in sessions:
            run = self._run(number, self._prompts[prompt], sampling, Session(*session))
            self._tasks[number] = asyncio.create_task(run)
        for number in cancelled:
            if number in self._tasks:
                self._tasks[number].cancel()
        for key in forgotten:
            self._prompts.pop(key, None)

    async def results(self) -> bytes:
        """The results since the last call; waits until there is one."""
        await self._some.wait()
        await asyncio.sleep(COALESCE_S)
        self._some.clear()
        results, self._results = self._results, []
        return pickle.dumps(results)

    async def call(self, method: str, args: tuple[Any, ...]) -> None:
        await self._runner.call(method, *own(args))

    async def _run(self, number: int, prompt: Any, sampling: Any, session: Session) -> None:
        result: Any
        try:
            if isinstance(prompt, SessionFailure):
                raise prompt
            result = await self._runner.run(prompt, sampling, session)
        except asyncio.CancelledError:
            result = InfrastructureFailure("cancelled")
        except BaseException as error:  # a result in any case: the driver waits for it
            result = bare(as_failure(error))
        del self._tasks[number]
        self._results.append((number, None if result is None else sendable(result)))
        self._some.set()
