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
from rlskip.dispatch.pools import Runner, Worker
from rlskip.dispatch.sessions import (
    NOTHING,
    DataFailure,
    InfrastructureFailure,
    Returned,
    Session,
    SessionFailure,
    as_failure,
    text_of,
)

COALESCE_S = 0.002
"""Seconds that a session or a result waits for others to travel with it."""


class Actor:
    """The actor's side: runs sessions, and returns their results when asked."""

    def __init__(self, worker: Worker) -> None:
        self._runner = Runner(worker, self._ended)
        self._prompts: dict[int, Any] = {}
        self._results: list[tuple[int, bytes | None]] = []
        self._some = asyncio.Event()

    async def hello(self) -> None:
        pass

    async def take(self, packed: bytes) -> None:
        sessions, prompts, cancelled, forgotten = pickle.loads(packed)
        for key, fields in prompts.items():
            self._prompts[key] = unpack(fields, "its prompt cannot be read in the actor")
        for number, key, sampling, session in sessions:
            if isinstance(prompt := self._prompts[key], SessionFailure):
                self._ended(number, NOTHING, prompt)
            else:
                self._runner.start(number, prompt, sampling, Session(*session))
        for number in cancelled:
            self._runner.stop(number)
        for key in forgotten:
            self._prompts.pop(key, None)

    def _ended(self, number: int, result: Returned, error: BaseException | None) -> None:
        packed = None  # as short as what most workers of verl's return
        try:
            if error is not None or result != NOTHING:
                packed = pack(result if error is None else _plain(as_failure(error)))
        except Exception as refused:  # each on its own, so that what cannot be sent fails alone
            packed = pack(DataFailure(f"its result cannot be sent: {text_of(refused)}"))
        self._results.append((number, packed))
        self._some.set()

    async def results(self) -> bytes:
        """The results since the last call; waits until there is one."""
        await self._some.wait()
        await asyncio.sleep(COALESCE_S)
        self._some.clear()
        results, self._results = self._results, []
        return pickle.dumps(results)

    async def call(self, method: str, args: tuple[Any, ...]) -> None:
        await self._runner.call(method, own(args))


def _plain(failure: SessionFailure) -> SessionFailure:
    """The kind and the text of a failure: any process can load these, whatever its class is."""
    kind = InfrastructureFailure if isinstance(failure, InfrastructureFailure) else DataFailure
    return kind(text_of(failure))


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
