"""The conformance suite on a MemoryQueue, and what only the embedded queue promises."""

import pytest

from rlskip.queue import MemoryQueue
from tests.queue.queue_tests import PolledQueue, QueueTests


class TestMemoryQueue(QueueTests):
    @pytest.fixture(params=[MemoryQueue, PolledQueue])
    def queue(self, request):
        return request.param()


def test_an_idle_watch_does_not_grow():
    queue = MemoryQueue()
    queue.put(["stays"], "train", None, [{}])
    watch = queue.watch()
    for i in range(1000):
        queue.put([f"u{i}"], "train", None, [{}])
        queue.delete([f"u{i}"], "train")
    assert queue._noted == {"train": {"stays": False}}
    assert watch.poll() == {"train": {"stays": {}}}
