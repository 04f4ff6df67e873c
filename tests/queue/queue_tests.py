"""What every queue does: a suite that the test modules of queues inherit."""

from __future__ import annotations

import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rlskip.queue import (
    MemoryQueue,
    MissingKeysError,
    PutError,
    TrajectoryQueue,
    UnequalFieldsError,
    to_rows,
)
from rlskip.queue.transfer_queue import PollingWatch

NESTED = TensorDict({"x": TensorDict(batch_size=[1])}, batch_size=[1])
_PATIENCE_S = 10.0


class PolledQueue(MemoryQueue):
    """Watched as TransferQueue is, by polling."""

    def watch(self) -> PollingWatch:
        return PollingWatch(lambda: {name: self.list(name) for name in list(self._tags)})


class QueueTests:
    """Every behaviour that :class:`rlskip.queue.TrajectoryQueue` specifies."""

    @pytest.fixture
    def queue(self) -> TrajectoryQueue:
        """The queue under test. It may be shared: each test uses its own partition."""
        raise NotImplementedError("override the fixture `queue`")

    @pytest.fixture
    def partition(self) -> str:
        return f"partition-{uuid.uuid4().hex[:8]}"

    # -- put and get -----------------------------------------------------------------------
    def test_lengths_and_dtypes_survive(self, queue: Any, partition: str) -> None:
        def row(length: int) -> dict[str, Any]:
            return {
                "int64": torch.arange(length) + 2**40,
                "float32": torch.full((length, 2), 0.1),
                "bfloat16": torch.tensor([0.5], dtype=torch.bfloat16),
                "bool": torch.tensor([True, False]),
                "scalar": torch.tensor(7, dtype=torch.int32),
                "either": torch.tensor([length / 2 if length else 1]),  # the dtypes of rows differ
            }

        queue.put(["a", "b", "c"], partition, [row(length) for length in (3, 0, 5)])
        back = to_rows(queue.get(["a", "b", "c"], partition))
        for found, length in zip(back, (3, 0, 5), strict=True):
            for name, value in row(length).items():
                assert found[name].dtype == value.dtype, name
                assert torch.equal(found[name], value), name

    def test_any_object_can_be_a_value_in_any_order(self, queue: Any, partition: str) -> None:
        values = ["text", {"role": "user", "content": ["x", 1]}, None]
        fields = {"v": NonTensorStack(*values), "agent": NonTensorData("tool", batch_size=[3])}
        fields["ids"] = torch.arange(6).view(3, 2)
        queue.put(["a", "b", "c"], partition, TensorDict(fields, batch_size=[3]))
        rows = to_rows(queue.get(["c", "b", "a"], partition))
        assert [row.pop("ids").tolist() for row in rows] == [[4, 5], [2, 3], [0, 1]]
        assert rows == [{"v": value, "agent": "tool"} for value in values[::-1]]

    def test_a_second_put_merges(self, queue: Any, partition: str) -> None:
        queue.put(["a"], partition, [{"x": torch.tensor([1])}], [{"status": "running", "n": 2}])
        queue.put(["a"], partition, [{"y": torch.tensor([2])}], [{"status": "success"}])
        assert queue.list(partition) == {"a": {"status": "success", "n": 2}}
        (row,) = to_rows(queue.get(["a"], partition))
        assert (row["x"].tolist(), row["y"].tolist()) == ([1], [2])

    def test_what_was_put_is_a_copy(self, queue: Any, partition: str) -> None:
        ids, turns, tag = torch.tensor([1, 2]), [{"role": "user"}], {"status": "running"}
        queue.put(["a"], partition, [{"ids": ids, "turns": turns}], [tag])
        ids[0] = 99
        turns[0]["role"] = tag["status"] = "changed"
        queue.get(["a"], partition)["ids"].values().fill_(77)
        queue.list(partition)["a"]["status"] = "changed"
        assert queue.list(partition) == {"a": {"status": "running"}}
        (row,) = to_rows(queue.get(["a"], partition))
        assert row["ids"].tolist() == [1, 2]
        assert row["turns"] == [{"role": "user"}]

    # -- refused arguments --------------------------------------------------------------------
    @pytest.mark.parametrize("fill", [False, True])
    def test_what_is_missing_is_named_and_nothing_returned(
        self, queue: Any, partition: str, fill: bool
    ) -> None:
        queue.put(["a"], partition, [{"x": torch.tensor([1])}])
        queue.put(["tag only"], partition, None, [{"status": "running"}])
        for keys, of, fields, said in (
            (["a", "gone"], partition, None, "'gone'"),
            (["a"], partition + "-unknown", None, "'a'"),
            (["a"], partition, ["x", "nope"], "nope"),
            (["a", "tag only"], partition, None, "no field"),
        ):
            with pytest.raises(MissingKeysError, match=said):
                queue.get(keys, of, fields, fill_missing=fill)

    def test_rows_of_unequal_fields_are_not_one_batch(self, queue: Any, partition: str) -> None:
        for session, row in enumerate([{"x": 1, "y": 2}, {"x": 1}, {"x": 1, "y": 2, "z": 3}]):
            queue.put([f"u_1_{session}_0"], partition, [row])
        keys = [f"u_1_{session}_0" for session in range(3)]
        with pytest.raises(UnequalFieldsError, match=r"session 1 of prompt 'u_1'.* lacks 'y'"):
            queue.get(keys, partition)
        again = [*keys, keys[0]]
        assert [row["x"] for row in to_rows(queue.get(again, partition, ["x"]))] == [1] * 4
        assert set(queue.get(keys[::2][:1], partition).keys()) == {"x", "y"}

    def test_missing_fields_are_filled_with_none_unless_they_are_tensors(
        self, queue: Any, partition: str
    ) -> None:
        rows = [{"x": 1, "y": "a"}, {"x": 2}, {"x": 3, "y": "c", "mask": torch.ones(2)}]
        for session, row in enumerate(rows):
            queue.put([f"u_{session}_0"], partition, [row])
        keys = [f"u_{session}_0" for session in range(3)]
        found = to_rows(queue.get([*keys[:2], keys[0]], partition, fill_missing=True))
        assert found == [{"x": 1, "y": "a"}, {"x": 2, "y": None}, {"x": 1, "y": "a"}]
        found = to_rows(queue.get(keys, partition, ["y"], fill_missing=True))
        assert found == [{"y": "a"}, {"y": None}, {"y": "c"}]
        for fields in (None, ["x", "mask"]):
            with pytest.raises(UnequalFieldsError, match="lacks 'mask', and so do 1 more"):
                queue.get(keys, partition, fields, fill_missing=True)

    @pytest.mark.parametrize(
        ("keys", "fields", "tags", "message"),
        [
            ([], None, [], "nothing to put"),
            (["a"], None, None, "nothing to put"),
            (["a", "a"], None, [{}, {}], "given twice: a"),
            (["a", "b"], None, [{}], "2 keys, but 1 tags"),
            (["a", "b"], [{"x": 1}], None, "2 keys, but 1 fields"),
            (["a", "b"], [{"x": 1}, {"y": 1}], None, "some rows hold x, y"),
            (["a"], [{"x": TensorDict()}], None, "'x' is a nested TensorDict"),
            (["a"], NESTED, None, "'x' is a nested TensorDict"),
            (["a"], [{1: 2}], None, "the name 1 of a field is not a string"),
            ("ab", None, [{}, {}], "sequence of keys"),
        ],
    )
    def test_an_invalid_put_is_refused(
        self, queue: Any, partition: str, keys: Any, fields: Any, tags: Any, message: str
    ) -> None:
        with pytest.raises(PutError, match=message):
            queue.put(keys, partition, fields, tags)
        assert queue.list(partition) == {}

    # -- list and delete -----------------------------------------------------------------------
    def test_deleted_keys_are_gone_and_start_empty(self, queue: Any, partition: str) -> None:
        queue.put(["a", "b"], partition, [{"x": 1}, {"x": 2}], [{}, {"status": "success"}])
        queue.put(["a"], partition + "-val", None, [{"where": 2}])
        for _ in range(2):
            queue.delete(["a", "never there"], partition)
            assert queue.list(partition) == {"b": {"status": "success"}}
        queue.delete([], partition)
        queue.delete(["a"], partition + "-unknown")
        queue.delete(["b"], partition)
        queue.put(["b"], partition, [{"y": 2}], [{"n": 1}])
        assert queue.list(partition) == {"b": {"n": 1}}
        assert to_rows(queue.get(["b"], partition)) == [{"y": 2}]
        assert queue.list(partition + "-val") == {"a": {"where": 2}}

    # -- watch ---------------------------------------------------------------------------------
    def test_a_watch_reports_each_change_once(self, queue: Any, partition: str) -> None:
        queue.put(["old"], partition, None, [{"n": 1}])
        watch = queue.watch()
        assert watch.poll().get(partition) == {"old": {"n": 1}}
        assert partition not in watch.poll()
        queue.put(["new", "old"], partition, None, [{"n": 2}, {"status": "finished"}])
        queue.put(["new"], partition, None, [{"n": 3}])
        assert watch.poll()[partition] == {"new": {"n": 3}, "old": {"n": 1, "status": "finished"}}
        queue.delete(["old"], partition)
        queue.put(["brief"], partition, None, [{}])
        queue.delete(["brief"], partition)
        assert watch.poll()[partition] == {"old": None}
        assert partition not in watch.poll()

    def test_waiting_ends_with_a_change_or_the_timeout(self, queue: Any, partition: str) -> None:
        watch = queue.watch()
        watch.poll()
        start = time.monotonic()
        watch.wait_change(0.05)
        assert time.monotonic() - start < _PATIENCE_S
        timer = threading.Timer(0.05, lambda: queue.put(["a"], partition, None, [{"n": 1}]))
        timer.start()
        end = time.monotonic() + _PATIENCE_S
        while partition not in (changes := watch.poll()):
            assert time.monotonic() < end, "no change was reported"
            watch.wait_change(end - time.monotonic())
        assert changes[partition] == {"a": {"n": 1}}
        timer.join()

    # -- threads -------------------------------------------------------------------------------
    def test_concurrent_writers_lose_nothing(self, queue: Any, partition: str) -> None:
        def write(worker: int) -> None:
            for i in range(20):
                queue.put([f"{worker}_{i}_0"], partition, [{"x": torch.tensor([i])}], [{"i": i}])

        watch, seen = queue.watch(), dict[str, Any]()
        watch.poll()
        with ThreadPoolExecutor(4) as pool:
            writers = [pool.submit(write, worker) for worker in range(4)]
            ended = False
            while not ended:
                ended = all(writer.done() for writer in writers)
                new = {key: tag for key, tag in watch.poll().get(partition, {}).items() if tag}
                rows = to_rows(queue.get(list(new), partition))
                # Who sees the tag finds the row.
                assert [row["x"].tolist() for row in rows] == [[tag["i"]] for tag in new.values()]
                seen.update(new)
            assert [writer.result() for writer in writers] == [None] * 4
        assert queue.list(partition) == seen
        assert len(seen) == 80
