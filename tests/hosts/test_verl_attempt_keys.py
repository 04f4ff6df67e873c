"""The rows of two attempts at one session, as verl's worker writes them."""

from __future__ import annotations

import asyncio
from typing import Any

from rlskip.dispatch import Session
from rlskip.hosts.verl.queue import AttemptKeys, running
from rlskip.keys import prompt_tag, session_tag
from rlskip.queue import MemoryQueue, ReplayBuffer


class Transfer:
    """The two names of `transfer_queue` that verl's worker uses, over a queue of this process."""

    def __init__(self, queue: MemoryQueue) -> None:
        self._queue = queue

    def init(self) -> str:
        return "joined"

    async def async_kv_batch_put(
        self, keys: list[str], partition_id: str, fields: Any, tags: Any
    ) -> None:
        self._queue.put(keys, partition_id, fields, tags)


def test_a_late_attempt_neither_replaces_rows_nor_mixes_with_them() -> None:
    queue = MemoryQueue()
    transfer = AttemptKeys(Transfer(queue))
    assert transfer.init() == "joined"
    late = asyncio.Event()

    async def attempt(number: int, rows: int) -> None:
        """What AgentLoopWorkerTQ writes at the end of a session."""
        running.set(Session("u", 0, 1, number, 1, 0, 0, False, 7, "train"))
        if number == 0:
            await late.wait()
        await transfer.async_kv_batch_put(
            keys=[f"u_0_{i}" for i in range(rows)],
            fields=[{"made_by": number} for _ in range(rows)],
            tags=[{"status": "success", "seq_len": 4} for _ in range(rows)],
            partition_id="train",
        )

    async def run() -> None:
        given_up = asyncio.create_task(attempt(0, 1))
        await asyncio.create_task(attempt(1, 2))
        queue.put(["u_sess0"], "train", tags=[session_tag(0, attempt=1)])
        late.set()
        await given_up

    queue.put(["u"], "train", tags=[prompt_tag(1, 1)])
    asyncio.run(run())
    batch, _ = ReplayBuffer(queue, {"replay": {"timeout_s": 2.0}}).sample(1, "train", 1)
    assert batch.keys == ["u_0_1000000", "u_0_1000001"]
    assert [tag["seq_len"] for tag in batch.tags] == [4, 4]
    assert list(queue.get(batch.keys, "train")["made_by"]) == [1, 1]
