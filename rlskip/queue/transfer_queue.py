"""The queue protocol on TransferQueue, for sessions in other processes and on other nodes."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

from rlskip.config.check import look_up
from rlskip.queue.protocol import (
    Changes,
    Fields,
    MissingKeysError,
    QueueUnavailableError,
    Row,
    Tag,
    Tags,
    TrajectoryQueue,
    Watch,
    check_fields,
    check_put,
    one_batch,
    to_batch,
    to_rows,
)

Listing = Mapping[str, Mapping[str, Tag]]

START_S = 120.0  # for ``transfer_queue.init``: its actors wait for CPUs without a deadline
CALL_S = 300.0  # for any other call of TransferQueue
CONTROLLER = ("TransferQueueController", "transfer_queue")  # an actor, and its namespace
POLL_S = (0.005, 0.5)  # between two listings: right after a change, and after a long quiet time


class TransferQueueAdapter(TrajectoryQueue):
    """TransferQueue's key-value interface (0.1.10 and later) as a trajectory queue.

    It joins the TransferQueue of the running Ray cluster, or starts one, exactly as
    ``transfer_queue.init(conf)`` does. An adapter sent to a Ray task or actor joins from there.

    TransferQueue does not report changes, and it lists either everything or nothing. A watch
    therefore polls, less often the longer nothing changes.

    Raises QueueUnavailableError if TransferQueue or Ray is not installed, or Ray is not running, or
    too small for it; and so does a call that is not answered within `CALL_S` seconds.
    """

    def __init__(self, conf: Any = None) -> None:
        self._tq = _transfer_queue()
        # A controller, and its storage units.
        cpus = 1 + (look_up(conf or {}, "backend.SimpleStorage.num_data_storage_units") or 2)
        try:
            if _in_worker():
                _await_cpus(cpus)
            _within(START_S, "transfer_queue.init", self._tq.init, conf)
        except QueueUnavailableError as error:
            raise QueueUnavailableError(error.what, remedy=_resources(cpus)) from error

    def __reduce__(self) -> Any:
        return TransferQueueAdapter, ()

    def put(
        self, keys: Sequence[str], partition: str, fields: Fields = None, tags: Tags = None
    ) -> None:
        check_put(keys, fields, tags)
        # One value per row in each field is what TransferQueue takes. A TensorDict that is so
        # already is not taken apart: a replayed step has a thousand long rows.
        is_batch = isinstance(fields, TensorDict) and all(
            isinstance(value, (torch.Tensor, NonTensorStack)) for value in fields.values()
        )
        if fields is not None and not is_batch:
            rows = to_rows(fields)
            fields = to_batch(rows, rows[0])
        copies = None if tags is None else [dict(tag) for tag in tags]
        self._call("kv_batch_put", list(keys), partition, fields=fields, tags=copies)

    def get(
        self,
        keys: Sequence[str],
        partition: str,
        fields: Sequence[str] | None = None,
        *,
        fill_missing: bool = False,
    ) -> TensorDict:
        def get(keys: Sequence[str], names: Sequence[str]) -> TensorDict:
            batch = self._call("kv_batch_get", list(keys), partition, select_fields=[*names])
            nested = [v for v in batch.values() if isinstance(v, torch.Tensor) and v.is_nested]
            if len(keys) == 1 or all(value.layout is torch.jagged for value in nested):
                return batch
            # Of rows of several dtypes, it made them all that of the first.
            return to_batch([to_rows(get([key], names))[0] for key in keys], names)

        if not keys:
            return to_batch([], ())
        # Of unequal rows TransferQueue returns those fields that all hold.
        held = self._held(keys, partition)
        alike = defaultdict[tuple[str, ...], list[str]](list)
        for key, names in held.items():
            alike[names].append(key)
        if len(held) == len(keys) and (len(alike) < 2 or not fill_missing):
            return get(keys, check_fields(held, partition, fields))
        rows: dict[str, Row] = {key: {} for key in keys}
        for names, some in alike.items():
            if names:
                rows.update(zip(some, to_rows(get(some, names)), strict=True))
        return one_batch(rows, partition, fill_missing, fields=fields, keys=keys)

    def list(self, partition: str) -> dict[str, dict[str, Any]]:
        listing: dict[str, dict[str, dict[str, Any]]] = self._call("kv_list", partition)
        return listing.get(partition, {})

    def delete(self, keys: Sequence[str], partition: str) -> None:
        if keys:
            self._call("kv_clear", list(keys), partition)

    def watch(self) -> Watch:
        return PollingWatch(lambda: self._call("kv_list"))

    def _held(self, keys: Sequence[str], partition: str) -> dict[str, tuple[str, ...]]:
        """The names of the fields that each row holds, by key; all keys must be there.

        TransferQueue's controller has a table of that; no call of its client does.
        """
        import ray

        def snapshot() -> Any:
            controller = ray.get_actor(*CONTROLLER)
            while True:
                try:
                    return ray.get(controller.get_partition_snapshot.remote(partition))
                except RuntimeError as error:
                    # It copies its table without a lock, while others put and delete.
                    if "changed size during iteration" not in str(error):
                        raise

        there = _within(CALL_S, "get_partition_snapshot", snapshot)
        places = {} if there is None else there.keys_mapping
        if missing := [key for key in keys if key not in places]:
            raise MissingKeysError.of_keys(missing, partition)
        held = there.production_status[[places[key] for key in keys]] == 1
        columns = there.field_name_mapping
        return {
            key: tuple(name for name, column in columns.items() if row[column])
            for key, row in zip(keys, held.tolist(), strict=True)
        }

    def _call(self, name: str, *args: Any, **more: Any) -> Any:
        return _within(CALL_S, f"transfer_queue.{name}", getattr(self._tq, name), *args, **more)


class PollingWatch(Watch):
    """Compares each full listing, of all partitions, with the previous one."""

    def __init__(self, listing: Callable[[], Listing]) -> None:
        self._list = listing
        self._pause_s = POLL_S[0]
        self._listing: Listing = {}

    def poll(self) -> Changes:
        before, now = self._listing, self._list()
        changes: Changes = {}
        for partition in before.keys() | now.keys():
            old, new = before.get(partition, {}), now.get(partition, {})
            changed: dict[str, Tag | None] = {k: tag for k, tag in new.items() if old.get(k) != tag}
            if len(old) > len(new) - sum(key not in old for key in changed):  # as is rare
                changed.update(dict.fromkeys(old.keys() - new.keys()))
            if changed:
                changes[partition] = changed
        self._listing = now
        self._pause_s = POLL_S[0] if changes else min(2 * self._pause_s, POLL_S[1])
        return changes

    def wait_change(self, timeout: float) -> None:
        time.sleep(min(self._pause_s, timeout))


def _within(seconds: float, name: str, call: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """``call(*args, **more)`` on a thread of its own, which is abandoned after `seconds`."""
    if _in_worker():  # Ray ties what that awaits to its own thread
        return call(*args, **more)
    outcome: Future[Any] = Future()

    def work() -> None:
        try:
            outcome.set_result(call(*args, **more))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name="rlskip-transfer-queue", daemon=True).start()
    if not wait([outcome], seconds).done:
        raise QueueUnavailableError(
            f"{name} did not answer within {seconds:g} s", remedy="is its controller alive?"
        )
    return outcome.result()


def _in_worker() -> bool:
    """Whether this is a task or an actor of Ray."""
    context = getattr(sys.modules.get("ray"), "get_runtime_context", None)
    return context is not None and context().worker.mode == 1


def _await_cpus(cpus: int) -> None:
    """Wait until Ray has the CPUs for ``init``, which in a worker would wait for ever."""
    import ray

    end = time.monotonic() + START_S
    with contextlib.suppress(ValueError):
        ray.get_actor(*CONTROLLER)
        return  # it runs already, whatever it took
    while ray.cluster_resources().get("CPU", 0) < cpus:
        if time.monotonic() > end:
            raise QueueUnavailableError(f"Ray did not have the CPUs within {START_S:g} s")
        time.sleep(POLL_S[1])


def _resources(cpus: int) -> str:
    """What TransferQueue asks of Ray, and what Ray has."""
    import ray

    has, free = ray.cluster_resources().get("CPU", 0), ray.available_resources().get("CPU", 0)
    return (
        f"it starts a controller and {cpus - 1} storage units, which take a CPU each: {cpus} in "
        f"all. Ray has {has:g} CPUs, of which {free:g} are free: ray.init(num_cpus=...)"
    )


def _transfer_queue() -> Any:
    try:
        import ray
        import transfer_queue
    except ImportError as error:
        raise QueueUnavailableError(
            f"TransferQueueAdapter needs {error.name}", remedy="pip install 'rlskip[ray]'"
        ) from error
    if not ray.is_initialized():
        raise QueueUnavailableError(
            "TransferQueueAdapter runs on Ray, and Ray is not running in this process",
            remedy="call ray.init() first",
        )
    return transfer_queue
