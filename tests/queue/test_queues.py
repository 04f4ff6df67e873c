"""MemoryQueue, and TransferQueueAdapter on a real TransferQueue: SimpleStorage on a local Ray."""

import dataclasses
import gc
import pickle
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlskip.batch.columns import own
from rlskip.dispatch.sessions import returned
from rlskip.keys import prompt_tag, row_tag, session_tag
from rlskip.queue import (
    KVBatchMeta,
    MemoryQueue,
    QueueUnavailableError,
    TransferQueueAdapter,
    to_rows,
    transfer_queue,
)
from rlskip.queue.protocol import OwnRow, to_batch
from rlskip.queue.transfer_queue import PollingWatch
from tests.queue.queue_tests import PolledQueue, QueueTests


class TestMemoryQueue(QueueTests):
    @pytest.fixture(params=[MemoryQueue, PolledQueue])
    def queue(self, request):
        return request.param()

    def test_an_idle_watch_does_not_grow(self):
        queue = MemoryQueue()
        queue.put(["stays"], "train", None, [{}])
        watch = queue.watch()
        for i in range(1000):
            queue.put([f"u{i}"], "train", None, [{}])
            queue.delete([f"u{i}"], "train")
            assert queue.list(f"asked {i}") == {}
        assert queue._tags == {"train": {"stays": {}}}
        assert queue._noted == {"train": {"stays": False}}
        assert watch.poll() == {"train": {"stays": {}}}


VALUES = [
    *(torch.arange(3), torch.arange(9.0).reshape(3, 3).T, torch.zeros(0, 2), torch.tensor(7)),
    *(torch.tensor([1 + 2j]).conj(), torch.ones(2, requires_grad=True), torch.eye(2).to_sparse()),
    *(torch.ones(2, dtype=torch.bfloat16), torch.ones(1 << 14)),
    *(np.arange(3), np.float32(1.5), [np.arange(2), torch.arange(2)]),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_row_keeps_a_value_as_it_is_and_shares_nothing_with_it(value):
    row, text = OwnRow({"x": value}), repr(own(value))
    if isinstance(value, torch.Tensor | np.ndarray):
        with torch.no_grad():
            value *= 0
    queue = MemoryQueue()
    queue.put(["a"], "train", [pickle.loads(pickle.dumps(row))])
    (back,) = to_rows(queue.get(["a"], "train"))
    assert text == repr(row["x"]) == repr(OwnRow({**row, "y": 1})["x"]) == repr(back["x"])


def test_scalars_of_several_dtypes_keep_theirs():
    rows = [{"score": torch.tensor(score)} for score in (2**24 + 1, 0.5, True)]
    assert [row["score"].dtype for row in to_rows(to_batch(rows, ["score"]))] == [
        *(torch.int64, torch.float32, torch.bool)
    ]


def test_the_garbage_collector_does_not_look_through_short_tensors_of_rows():
    row = {"ids": torch.arange(9), "last": torch.tensor(True)}
    assert not any(gc.is_tracked(own.kept) for own in (OwnRow(row), *returned(row)))


def test_a_batch_has_the_fields_of_transfer_queues_own():
    original = pytest.importorskip("transfer_queue").KVBatchMeta
    ours = KVBatchMeta(["a", "b"], [{}, {"n": 1}], "train", ["x"], {"rollout_root_keys": ["u"]})
    assert [field.name for field in dataclasses.fields(original)] == list(vars(ours))
    assert vars(ours).items() <= vars(original(**vars(ours))).items()


def test_it_polls_less_often_the_longer_nothing_changes(monkeypatch):
    pauses, listing = [], {}
    monkeypatch.setattr("rlskip.queue.transfer_queue.time", SimpleNamespace(sleep=pauses.append))
    monkeypatch.setattr(transfer_queue, "POLL_S", (0.01, 0.05))
    watch = PollingWatch(lambda: dict(listing))
    for _ in range(4):
        watch.poll()
        watch.wait_change(30)
    assert pauses == [0.02, 0.04, 0.05, 0.05]
    listing["train"] = {"a": {}}
    watch.poll()
    watch.wait_change(30)
    watch.wait_change(0.001)
    assert pauses[4:] == [0.01, 0.001]


def test_without_a_running_ray_it_is_unavailable(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "")
    with pytest.raises(QueueUnavailableError, match=r"ray\.init\(\)|rlskip\[ray\]"):
        TransferQueueAdapter()


@pytest.fixture
def fake(monkeypatch):
    """Put modules of these contents in the place of TransferQueue and Ray."""

    def put(ray, **calls):
        module = SimpleNamespace(**{"init": lambda conf: None, **calls})
        monkeypatch.setattr(transfer_queue, "_transfer_queue", lambda: module)
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(**ray))
        monkeypatch.setattr(transfer_queue, "START_S", 0.05)
        monkeypatch.setattr(transfer_queue, "CALL_S", 0.05)

    return put


@pytest.fixture
def hangs():
    released = threading.Event()
    yield lambda *_, **__: released.wait(60)
    released.set()


@pytest.mark.parametrize(("mode", "said"), [(0, "init did not answer"), (1, "not have the CPUs")])
def test_a_start_that_hangs_is_named_with_what_ray_lacks(fake, hangs, mode, said):
    """Its actors wait for CPUs, and its own `init` waits for them without a deadline."""
    has = {"cluster_resources": {"CPU": 2.0}, "available_resources": {"CPU": 0.5}}
    ray = {name: lambda cpus=cpus: cpus for name, cpus in has.items()}
    ray["get_runtime_context"] = lambda: SimpleNamespace(worker=SimpleNamespace(mode=mode))
    fake({**ray, "get_actor": lambda *_: int("no such actor")}, init=hangs)
    conf = {"backend": {"SimpleStorage": {"num_data_storage_units": 4}}}
    with pytest.raises(QueueUnavailableError) as error:
        TransferQueueAdapter(conf)
    assert f"{said} within 0.05 s" in error.value.what
    for fact in ("4 storage units", "5 in all", "has 2 CPUs, of which 0.5 are free"):
        assert fact in error.value.remedy


CALLS = {
    "put": lambda queue: queue.put(["a"], "train", None, [{}]),
    "get": lambda queue: queue.get(["a"], "train", ["x"]),
    "list": lambda queue: queue.list("train"),
    "delete": lambda queue: queue.delete(["a"], "train"),
    "poll": lambda queue: queue.watch().poll(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_transfer_queue_does_not_answer_raises(fake, hangs, call):
    names = ("kv_batch_put", "kv_batch_get", "kv_list", "kv_clear")
    fake({"get_actor": hangs}, **dict.fromkeys(names, hangs))
    said = r"(transfer_queue\.kv_\w+|get_partition_snapshot) did not answer"
    with pytest.raises(QueueUnavailableError, match=said):
        CALLS[call](TransferQueueAdapter())


def test_a_table_that_changes_while_it_is_copied_is_asked_for_again(fake):
    table = SimpleNamespace(
        keys_mapping={"a": 0}, production_status=torch.ones(1, 1), field_name_mapping={"x": 0}
    )
    answers = iter([RuntimeError("dictionary changed size during iteration"), table])

    def get(_):
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    remote = SimpleNamespace(get_partition_snapshot=SimpleNamespace(remote=str))
    fake(
        {"get_actor": lambda *_, **__: remote, "get": get},
        kv_batch_get=lambda keys, partition, select_fields: dict.fromkeys(select_fields),
    )
    assert [*TransferQueueAdapter().get(["a"], "train")] == ["x"]


@pytest.mark.ray
@pytest.mark.timeout(180)
class TestTransferQueueAdapter(QueueTests):
    @pytest.fixture
    def queue(self, adapter):
        return adapter

    def test_another_process_joins_the_same_queue(self, queue, partition):
        import ray

        @ray.remote(num_cpus=0.1)
        def run_session(queue, uid):
            queue.put([f"{uid}_0_0"], partition, [{"x": uid}], [row_tag(3)])
            queue.put([f"{uid}_sess0"], partition, None, [session_tag(0)])

        queue.put(["u"], partition, None, [prompt_tag(3, n=1)])
        ray.get(run_session.remote(queue, "u"))
        assert queue.list(partition) == {
            "u": prompt_tag(3, n=1),
            "u_0_0": row_tag(3),
            "u_sess0": session_tag(0),
        }
        assert to_rows(queue.get(["u_0_0"], partition)) == [{"x": "u"}]

    def test_pickled_it_is_the_same_queue(self, queue, partition):
        queue.put(["a"], partition, None, [{"n": 1}])
        assert pickle.loads(pickle.dumps(queue)).list(partition) == {"a": {"n": 1}}
