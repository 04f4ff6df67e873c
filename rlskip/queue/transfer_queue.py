"""The queue protocol on TransferQueue, for sessions in other processes and on other nodes."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from tensordict import NonTensorData, TensorDict

from rlskip.queue.protocol import (
    Changes,
    KVBatchMeta,
    MissingKeysError,
    QueueUnavailableError,
    Row,
    Tag,
    TrajectoryQueue,
    Watch,
    check_put,
)
from rlskip.queue.rows import check_fields, one_batch, to_batch, to_rows

Listing = Mapping[str, Mapping[str, Tag]]

START_S = 120.0
"""Seconds that ``transfer_queue.init`` may take: its actors wait for CPUs without a deadline."""
POLL_S = (0.005, 0.5)
"""Seconds between two listings: right after a change, and after a long quiet time."""
CALL_S = 300.0
"""Seconds that any other call of TransferQueue may take."""


class TransferQueueAdapter(TrajectoryQueue):
    """TransferQueue's key-value interface (0.1.10 and later) as a trajectory queue.

    It joins the TransferQueue of the running Ray cluster, or starts one, exactly as
    ``transfer_queue.init(conf)`` does. An adapter sent to a Ray task or actor joins from there.

    TransferQueue does not report changes, and it lists either everything or nothing. A watch
    therefore polls, less often the longer nothing changes. `conf` is the argument of
    ``transfer_queue.init``, used only by the process that starts it.

    Raises
    ------
    QueueUnavailableError
        TransferQueue or Ray is not installed, or Ray is not running, or too small for it. A call
        that TransferQueue does not answer within `CALL_S` seconds raises it, too.
    """

    def __init__(self, conf: Any = None) -> None:
        transfer_queue = _transfer_queue()
        try:
            _within(START_S, "transfer_queue.init", transfer_queue.init, conf)
        except QueueUnavailableError as error:
            raise QueueUnavailableError(error.what, remedy=_resources(conf)) from error
        self._tq = _Bounded(transfer_queue)

    def __reduce__(self) -> Any:
        return TransferQueueAdapter, ()

    def put(
        self,
        keys: Sequence[str],
        partition: str,
        fields: TensorDict | Sequence[Row] | None = None,
        tags: Sequence[Tag] | None = None,
    ) -> KVBatchMeta:
        check_put(keys, fields, tags)
        meta = self._tq.kv_batch_put(
            keys=list(keys),
            partition_id=partition,
            fields=None if fields is None else _as_batch(fields),
            tags=None if tags is None else [dict(tag) for tag in tags],
        )
        return KVBatchMeta(meta.keys, meta.tags, meta.partition_id, meta.fields, meta.extra_info)

    def get(
        self,
        keys: Sequence[str],
        partition: str,
        fields: Sequence[str] | None = None,
        *,
        fill_missing: bool = False,
    ) -> TensorDict:
        if not keys:
            return to_batch([])
        if (fields is None or fill_missing) and (held := self._unequal(keys, partition)):
            if not (fill_missing and all(held.values())):
                check_fields(held, f"partition {partition!r}")
            return self._filled(held, partition, fields)
        select = None if fields is None else list(fields)
        try:
            data = self._tq.kv_batch_get(list(keys), partition, select_fields=select)
        except ValueError as error:
            raise self._missing(keys, partition, fields) from error
        # TransferQueue logs a warning for missing keys and returns a shorter batch.
        if len(data) < len(keys) or not set(fields or ()) <= set(data.keys()):
            raise self._missing(keys, partition, fields, list(data.keys()))
        return data

    def list(self, partition: str) -> dict[str, dict[str, Any]]:
        listing: dict[str, dict[str, dict[str, Any]]] = self._tq.kv_list(partition)
        return listing.get(partition, {})

    def delete(self, keys: Sequence[str], partition: str) -> None:
        if keys:
            self._tq.kv_clear(list(keys), partition)

    def watch(self) -> Watch:
        return PollingWatch(self._tq, *POLL_S)

    def _unequal(self, keys: Sequence[str], partition: str) -> dict[str, Sequence[str]]:
        """The fields of each row by key; empty if all hold the same.

        Of unequal rows TransferQueue returns those fields that all hold. Its controller has a
        table of which sample holds which field; no call of its client does.
        """
        import ray

        controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
        asked = controller.get_partition_snapshot.remote(partition)
        snapshot = _within(CALL_S, "get_partition_snapshot", ray.get, asked)
        if snapshot is None:
            return {}  # no such partition: the keys are missing, which get() says
        if missing := [key for key in keys if key not in snapshot.keys_mapping]:
            raise MissingKeysError.of_keys(missing, partition)
        held = snapshot.production_status[[snapshot.keys_mapping[key] for key in keys]] == 1
        if bool((held == held[:1]).all()):  # as nearly always
            return {}
        columns = snapshot.field_name_mapping
        return {
            key: [name for name, column in columns.items() if row[column]]
            for key, row in zip(keys, held, strict=True)
        }

    def _filled(
        self, held: Mapping[str, Sequence[str]], partition: str, fields: Sequence[str] | None
    ) -> TensorDict:
        """Rows of unequal fields, read in parts that hold the same."""
        parts = defaultdict[tuple[str, ...], list[str]](list)
        for key, names in held.items():
            wanted = names if fields is None else [name for name in fields if name in names]
            parts[tuple(wanted)].append(key)
        if absent := {*(fields or ())}.difference(*parts):
            raise MissingKeysError.of_fields(sorted(absent), (), partition)
        rows: dict[str, Row] = {key: {} for key in held}
        for names, keys in parts.items():
            if names:
                rows.update(zip(keys, to_rows(self.get(keys, partition, names)), strict=True))
        return one_batch(rows, partition, fill_missing=True)

    def _missing(
        self,
        keys: Sequence[str],
        partition: str,
        fields: Sequence[str] | None,
        held: Sequence[str] = (),
    ) -> MissingKeysError:
        there = self.list(partition)
        if missing := [key for key in keys if key not in there]:
            return MissingKeysError.of_keys(missing, partition)
        if fields is None:
            return MissingKeysError("the requested rows hold no field", f"partition {partition!r}")
        return MissingKeysError.of_fields(fields, held, partition)


class PollingWatch(Watch):
    """Compares each full listing with the previous one."""

    # Polls run one after the other, so that each change is reported to one caller; a wait needs no
    # lock, because it only reads `_pause_s`.

    def __init__(self, transfer_queue: Any, min_poll_s: float, max_poll_s: float) -> None:
        self._tq = transfer_queue
        self._min_s, self._max_s = min_poll_s, max_poll_s
        self._pause_s = min_poll_s
        self._listing: Listing = {}
        self._lock = threading.Lock()

    def poll(self) -> Changes:
        with self._lock:
            before, self._listing = self._listing, self._tq.kv_list()
            changes = difference(before, self._listing)
            self._pause_s = self._min_s if changes else min(2 * self._pause_s, self._max_s)
        return changes

    def wait_change(self, timeout: float) -> None:
        time.sleep(min(self._pause_s, timeout))


def difference(before: Listing, now: Listing) -> Changes:
    """Return the changes between two listings."""
    changes: Changes = {}
    for partition in before.keys() | now.keys():
        old, new = before.get(partition, {}), now.get(partition, {})
        changed: dict[str, Tag | None] = dict(new)
        if old:
            changed = {key: tag for key, tag in new.items() if old.get(key) != tag}
            added = sum(key not in old for key in changed)
            if len(old) + added > len(new):  # else no key is gone
                changed.update(dict.fromkeys(old.keys() - new.keys()))
        if changed:
            changes[partition] = changed
    return changes


def _as_batch(fields: TensorDict | Sequence[Row]) -> TensorDict:
    """Convert to what TransferQueue takes: a TensorDict with one value per row in each field."""
    if isinstance(fields, TensorDict) and not any(
        isinstance(value, NonTensorData) for value in fields.values()
    ):
        return fields
    return to_batch(to_rows(fields))


class _Bounded:
    """The module `transfer_queue`, each of whose calls has a deadline."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._module, name)
        return functools.partial(_within, CALL_S, f"transfer_queue.{name}", call)


def _within(seconds: float, name: str, call: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """``call(*args, **more)`` on a thread of its own, which is abandoned after `seconds`."""
    if _in_ray_worker():  # Ray ties what a task or an actor awaits to its own thread
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


def _in_ray_worker() -> bool:
    """Whether a task or an actor of Ray runs here, and not the process that started them."""
    context = getattr(sys.modules.get("ray"), "get_runtime_context", None)
    return context is not None and context().worker.mode == 1


def _resources(conf: Any) -> str:
    """What TransferQueue asks of Ray, and what Ray has."""
    import ray

    backend = (conf or {}).get("backend", {}) if hasattr(conf or {}, "get") else {}
    units = backend.get("SimpleStorage", {}).get("num_data_storage_units", 2)
    has, free = ray.cluster_resources().get("CPU", 0), ray.available_resources().get("CPU", 0)
    return (
        f"it starts a controller and {units} storage units, which take a CPU each: {units + 1} in "
        f"all. Ray has {has:g} CPUs, of which {free:g} are free. Give it more: "
        f"ray.init(num_cpus=...)"
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
