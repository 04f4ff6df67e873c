"""A queue written as sessions write it, and buffers on it whose clock stands until they wait."""

import pytest

from rlskip.keys import TrajectoryKey, prompt_tag, row_tag, session_tag, status_tag
from rlskip.queue import MemoryQueue, ReplayBuffer
from tests.clock import MockClock


class ClockedQueue(MemoryQueue):
    """Its watches wait on a MockClock."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def watch(self):
        watch = super().watch()
        watch.wait_change = self.clock.wait
        return watch


class Rollouts:
    """Writes to a queue as sessions do."""

    def __init__(self, queue, partition="train"):
        self.queue, self.partition = queue, partition

    def tag(self, key, tag):
        self.queue.put([key], self.partition, None, [tag])

    def session(
        self, uid, session_id, rows=1, step=1, error=None, marker=True, attempt=0, score=0.0
    ):
        keys = [str(TrajectoryKey.of_attempt(uid, session_id, i, attempt)) for i in range(rows)]
        if keys:
            fields = [{"x": index, "score": score} for index in range(rows)]
            self.queue.put(keys, self.partition, fields, [row_tag(step, attempt)] * rows)
        if marker:
            self.tag(f"{uid}_sess{session_id}", session_tag(session_id, attempt, error))

    def counted(self, uid, n=2, step=1, scores=(), **session):
        self.tag(uid, prompt_tag(step, n))
        for session_id, score in enumerate(scores or [0.0] * n):
            self.session(uid, session_id, step=step, score=score, **session)

    def finished(self, uid, n=2, step=1, status="finished"):
        for session_id in range(n):
            self.session(uid, session_id, step=step, marker=False)
        self.tag(uid, status_tag(step, status, expected=n))


@pytest.fixture
def clock(monkeypatch):
    clock = MockClock()
    monkeypatch.setattr("rlskip.queue.buffer.monotonic", clock)
    return clock


@pytest.fixture
def queue(clock):
    return ClockedQueue(clock)


@pytest.fixture
def rollouts(queue):
    return Rollouts(queue)


@pytest.fixture
def make_buffer(queue):
    def make(refill=None, more=None, **replay):
        config = {"replay": {"timeout_s": 5, **replay}}
        return ReplayBuffer(queue, config, refill=refill, **(more or {}))

    return make


@pytest.fixture
def buffer(make_buffer):
    return make_buffer()
