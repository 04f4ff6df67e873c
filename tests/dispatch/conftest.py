from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from rlskip.dispatch import LocalPool, Pool, RolloutDispatcher
from rlskip.keys import split_session, split_trajectory
from rlskip.queue import MemoryQueue, ReplayBuffer
from tests.clock import MockClock


@pytest.fixture
def make_prompts():
    """A batch of `count` prompts of `length` tokens, uids with underscores that begin with `of`."""

    def make(count: int, length: int = 8, of: str = "u", **fields: Any) -> TensorDict:
        tokens = torch.arange(count * length).reshape(count, length)
        uids = NonTensorStack(*[f"{of}_{i}" for i in range(count)])
        return TensorDict({"input_ids": tokens, "uid": uids, **fields}, batch_size=[count])

    return make


class LoggedQueue(MemoryQueue):
    """A MemoryQueue that remembers in which order keys were put, by one put after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, dict[str, Any] | None]] = []
        self._log_lock = threading.Lock()

    def put(self, keys, partition, fields=None, tags=None):  # type: ignore[no-untyped-def]
        with self._log_lock:
            super().put(keys, partition, fields, tags)
            self.log += zip(keys, map(dict, tags) if tags else [None] * len(keys), strict=True)

    def markers(self) -> list[tuple[str, dict[str, Any]]]:
        """The session markers that were put, in order."""
        return [(key, tag) for key, tag in self.log if split_session(key)]

    def by_prompt(self) -> dict[str, list[str]]:
        """The keys that were put since the last call, in order, by the uid of their prompt."""
        puts: dict[str, list[str]] = defaultdict(list)
        for key, _ in self.log:
            form = split_trajectory(key) or split_session(key)
            puts[form[0] if form else key].append(key)
        self.log.clear()
        return puts


def evict(queue: Any, uids: list[str], partition: str = "train") -> None:
    """Delete prompts from a queue, as a trainer does that has their groups."""
    ReplayBuffer(queue).evict(uids, partition)


@pytest.fixture
def echo():
    """A worker that returns two rows, of lengths 2 and 2 + the prompt's, naming their session."""

    async def echo(prompt, sampling, session):  # type: ignore[no-untyped-def]
        seed = torch.tensor([session.seed % 1000, session.session_id])
        return [{"responses": seed}, {"responses": torch.cat([seed, prompt["input_ids"]])}]

    return echo


@pytest.fixture
def clock(monkeypatch):
    """The clock of dispatchers made from now on: the deadlines of sessions go by it."""
    clock = MockClock()
    monkeypatch.setattr("rlskip.dispatch.timeouts.WRITE_S", 1e9)  # writes take real time
    monkeypatch.setattr(asyncio, "new_event_loop", clock.new_event_loop)
    return clock


@pytest.fixture
def queue() -> LoggedQueue:
    return LoggedQueue()


@pytest.fixture
def make_dispatcher(queue: LoggedQueue):
    """RolloutDispatchers, closed after the test; more keywords go to `dispatch`.

    On a pool, or local workers; with the fixture `queue`, or another one, or None.
    """
    made: list[RolloutDispatcher] = []

    def make(worker, workers=4, *, queue=queue, replay=None, store=None, **dispatch):
        dispatch = {"rollout_level": True, "n": 4, "session_timeout_s": 30, **dispatch}
        config = {"dispatch": dispatch, "replay": {"timeout_s": 30, **(replay or {})}}
        pool = worker if isinstance(worker, Pool) else LocalPool(worker, workers)
        made.append(RolloutDispatcher(pool, queue, config, store=store))
        return made[-1]

    yield make
    for dispatcher in made:
        dispatcher.close()
