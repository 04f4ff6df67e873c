"""The trajectory queue between sessions and the trainer: one protocol, two queues."""

from rlskip.queue.memory import MemoryQueue
from rlskip.queue.protocol import (
    Changes,
    KVBatchMeta,
    MissingKeysError,
    PutError,
    QueueUnavailableError,
    Row,
    Tag,
    TrajectoryQueue,
    Watch,
)
from rlskip.queue.rows import to_batch, to_rows
from rlskip.queue.transfer_queue import TransferQueueAdapter

__all__ = [
    "Changes",
    "KVBatchMeta",
    "MemoryQueue",
    "MissingKeysError",
    "PutError",
    "QueueUnavailableError",
    "Row",
    "Tag",
    "TrajectoryQueue",
    "TransferQueueAdapter",
    "Watch",
    "to_batch",
    "to_rows",
]
