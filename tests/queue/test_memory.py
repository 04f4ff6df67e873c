"""MemoryQueue: the conformance suite, a model, and what only the embedded queue promises."""

import gc
import pickle
import threading
import time
import weakref

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rlskip.errors import RlskipError
from rlskip.queue import MemoryQueue, to_rows
from rlskip.queue.rows import OwnRow
from tests.queue.queue_tests import QueueTests


class TestMemoryQueue(QueueTests):
    @pytest.fixture
    def queue(self):
        return MemoryQueue()


KEYS = st.lists(st.sampled_from(["u", "u_0_0", "u_1_0", "v"]), min_size=1, unique=True)
PARTITIONS = st.sampled_from(["train", "val"])


class QueueAgainstDicts(RuleBasedStateMachine):
    """The queue is two dicts; a reader that follows a watch knows what a fresh listing shows."""

    def __init__(self):
        super().__init__()
        self.queue = MemoryQueue()
        self.watch = self.queue.watch()
        self.tags = {"train": {}, "val": {}}
        self.rows = {"train": {}, "val": {}}
        self.followed = {"train": {}, "val": {}}

    @rule(keys=KEYS, partition=PARTITIONS, name=st.sampled_from("ab"), value=st.integers(0, 9))
    def put(self, keys, partition, name, value):
        self.queue.put(keys, partition, [{name: value}] * len(keys), [{name: value}] * len(keys))
        for key in keys:
            self.tags[partition].setdefault(key, {})[name] = value
            self.rows[partition].setdefault(key, {})[name] = value

    @rule(keys=KEYS, partition=PARTITIONS)
    def clear(self, keys, partition):
        self.queue.delete(keys, partition)
        for key in keys:
            self.tags[partition].pop(key, None)
            self.rows[partition].pop(key, None)

    @rule()
    def follow(self):
        for partition, changes in self.watch.poll().items():
            for key, tag in changes.items():
                if tag is None:
                    del self.followed[partition][key]  # only reported keys are reported as deleted
                else:
                    self.followed[partition][key] = tag
        assert self.followed == self.tags

    @invariant()
    def it_holds_what_the_dicts_hold(self):
        for partition in ("train", "val"):
            assert self.queue.list(partition) == self.tags[partition]
            for key, row in self.rows[partition].items():
                assert to_rows(self.queue.get([key], partition)) == [row]


TestQueueAgainstDicts = QueueAgainstDicts.TestCase
TestQueueAgainstDicts.settings = settings(max_examples=30, stateful_step_count=20)


def test_one_change_wakes_every_reader():
    queue = MemoryQueue()
    watches = [queue.watch() for _ in range(3)]
    readers = [threading.Thread(target=watch.wait_change, args=(30,)) for watch in watches]
    for reader in readers:
        reader.start()
    time.sleep(0.05)  # until they wait
    queue.put(["a"], "train", None, [{}])
    for reader in readers:
        reader.join(10)
    assert not any(reader.is_alive() for reader in readers)


def test_an_idle_watch_does_not_grow():
    queue = MemoryQueue()
    queue.put(["stays"], "train", None, [{}])
    watch = queue.watch()
    for i in range(1000):
        queue.put([f"u{i}"], "train", None, [{}])
        queue.delete([f"u{i}"], "train")
    assert watch.poll() == {"train": {"stays": {}}}


def test_the_queue_keeps_no_unused_watch():
    queue = MemoryQueue()
    watch = weakref.ref(queue.watch())
    gc.collect()
    assert watch() is None


def test_a_row_that_was_given_away_is_not_copied_again():
    queue, ids = MemoryQueue(), torch.zeros(3)
    queue.put(["a", "b"], "train", [OwnRow(x=ids), OwnRow(x=torch.ones(1))])
    ids.fill_(7)
    assert [row["x"].tolist() for row in to_rows(queue.get(["a", "b"], "train"))] == [[7] * 3, [1]]
    queue.put(["a", "b"], "train", [OwnRow(x=ids), {"x": ids}])
    ids.fill_(9)
    assert to_rows(queue.get(["b"], "train"))[0]["x"].tolist() == [7] * 3


def test_it_cannot_be_pickled():
    with pytest.raises(RlskipError, match=r"one process.*\n.*TransferQueueAdapter"):
        pickle.dumps(MemoryQueue())
