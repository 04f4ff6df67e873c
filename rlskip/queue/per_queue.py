"""What code of this process keeps of each queue, as long as the queue is there."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from rlskip.queue.protocol import TrajectoryQueue

T = TypeVar("T")


class PerQueue(Generic[T]):
    """A value for each queue, made when it is first asked for.

    Queues are told apart by what they are, not by equality: one of the user's may be a dataclass,
    which has no hash.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: dict[int, T] = {}
        self._lock = threading.Lock()

    def __getitem__(self, queue: TrajectoryQueue) -> T:
        with self._lock:
            if id(queue) not in self._values:
                self._values[id(queue)] = self._make()
                weakref.finalize(queue, self._values.pop, id(queue)).atexit = False
            return self._values[id(queue)]
