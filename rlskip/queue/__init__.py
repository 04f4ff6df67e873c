"""The queue between sessions and the trainer, and the buffer that finds complete groups in it."""

from rlskip.queue.buffer import ReplayBuffer
from rlskip.queue.memory import MemoryQueue
from rlskip.queue.protocol import (
    KVBatchMeta,
    MissingKeysError,
    PutError,
    QueueUnavailableError,
    Row,
    Tag,
    TrajectoryQueue,
    UnequalFieldsError,
    Watch,
    to_rows,
)
from rlskip.queue.readiness import IncompleteRolloutError, PromptOutcome, ReplayTimeoutError
from rlskip.queue.sampling import GroupFilter
from rlskip.queue.transfer_queue import TransferQueueAdapter

__all__ = [
    "GroupFilter",
    "IncompleteRolloutError",
    "KVBatchMeta",
    "MemoryQueue",
    "MissingKeysError",
    "PromptOutcome",
    "PutError",
    "QueueUnavailableError",
    "ReplayBuffer",
    "ReplayTimeoutError",
    "Row",
    "Tag",
    "TrajectoryQueue",
    "TransferQueueAdapter",
    "UnequalFieldsError",
    "Watch",
    "to_rows",
]
