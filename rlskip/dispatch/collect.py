"""Takes the rows of complete groups out of the queue, within a bounded time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

import attrs
import torch
from tensordict import NonTensorStack, TensorDict

from rlskip.dispatch import timeouts
from rlskip.dispatch.batch import BatchHandle
from rlskip.dispatch.uids import Uids
from rlskip.keys import TrajectoryKey
from rlskip.queue import ReplayBuffer

Rows = tuple[TensorDict, dict[str, float]]
"""The rows, with columns that name prompt and session, and the metrics of sampling them."""


@attrs.frozen
class Collector:
    """Collects batches through `buffer`; each access may take `seconds`."""

    buffer: ReplayBuffer
    uids: Uids
    seconds: float

    def own_rows(self, batch: BatchHandle, begin: Callable[[BatchHandle], None]) -> Rows:
        """`begin` a batch, and take its rows; if there is an error, it leaves nothing behind."""
        uids = {prompt.uid for prompt in batch.prompts}  # and those that will replace them
        try:
            timeouts.bounded(self.seconds, self.buffer.reserve, uids, batch.partition)
            begin(batch)
            batch.result()
            return self.take(batch.step, batch.partition, None, uids)
        except BaseException:
            self._remove(batch, uids)
            raise

    def _remove(self, batch: BatchHandle, uids: set[str]) -> None:
        """End a batch and those that refill it, and delete what they have written."""
        batches, ended = {batch}, set()
        while batches:
            for one in batches:
                one.cancel()
            for one in batches:
                one.settled.wait(timeouts.CLOSE_S)
            with contextlib.suppress(Exception):
                timeouts.bounded(timeouts.CLOSE_S, self.buffer.evict, uids, batch.partition)
            ended |= batches
            batches = self.uids.batches_of(batch.partition, uids) - ended

    def take(
        self, step: int, partition: str, batch_size: int | None, uids: set[str] | None = None
    ) -> Rows:
        """Sample groups, and take their rows out of the queue.

        Groups whose rows cannot be read are deleted. If the caller is interrupted before they are
        read, they are there for the next call.
        """
        seconds = self.seconds + self.buffer.config.timeout_s
        buffer, stop = self.buffer, threading.Event()
        sampling = step, partition, batch_size, uids, stop
        try:
            taken, metrics = timeouts.bounded(
                seconds, buffer.sample, *sampling, undo=lambda sampled: buffer.give_back(sampled[0])
            )
        except BaseException:
            stop.set()  # its thread goes on
            raise
        try:
            rows = _with_ids(timeouts.bounded(seconds, buffer.get, taken), taken.keys)
        except BaseException as error:
            end = buffer.clear if isinstance(error, Exception) else buffer.give_back
            with contextlib.suppress(Exception):
                timeouts.bounded(timeouts.CLOSE_S, end, taken)
            raise
        timeouts.bounded(seconds, buffer.clear, taken)
        return rows, metrics


def _with_ids(rows: TensorDict, keys: Sequence[str]) -> TensorDict:
    """`rows` with columns that name the prompt and the session of each."""
    parsed = [TrajectoryKey.parse(key) for key in keys]
    if "uid" not in rows:
        rows["uid"] = NonTensorStack(*(key.uid for key in parsed))
    if "session_id" not in rows:
        rows["session_id"] = torch.tensor([key.session_id for key in parsed])
    return rows
