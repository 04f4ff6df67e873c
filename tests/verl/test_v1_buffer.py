"""The buffer behind verl's `custom_sampler`, on a real TransferQueue: local Ray, no verl."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlskip.config.other_nodes import ReplayConfig
from rlskip.keys import row_tag, session_tag, status_tag

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

N = 2
_uids = itertools.count()


@pytest.fixture(scope="module")
def queue() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    transfer_queue = pytest.importorskip("transfer_queue")
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    from rlskip.hosts.verl.queue import run_queue

    run_queue.cache_clear()
    yield run_queue()
    run_queue.cache_clear()
    transfer_queue.close()
    ray.shutdown()


@pytest.fixture
def train(queue: Any) -> Any:
    """The queue; its partitions are emptied afterwards."""
    yield queue
    for partition in ("train", "val"):
        queue.delete(list(queue.list(partition)), partition)


def buffer(refill: Any = None, **replay: Any) -> Any:
    """Made by keyword, as verl's trainer does."""
    from rlskip.hosts.verl.queue import FailClosedReplayBuffer

    settings = ReplayConfig(n=N, val_n=N, timeout_s=5.0, **replay)
    return FailClosedReplayBuffer(
        trainer_mode="sync",
        trainer_config={},
        max_off_policy_threshold=2,
        max_off_policy_strategy="drop",
        sampler_kwargs=dataclasses.asdict(settings),
        refill_fn=refill,
    )


def submit(queue: Any, prompts: int) -> list[str]:
    """As verl's trainer and worker do: the root is pending, then gets a bare status."""
    uids = [f"p-{next(_uids)}" for _ in range(prompts)]
    queue.put(uids, "train", tags=[status_tag(1, "pending")] * prompts)
    queue.put(uids, "train", tags=[{"status": "running"}] * prompts)
    return uids


def finish(queue: Any, uids: list[str], sessions: int = N) -> None:
    for uid in uids:
        keys = [f"{uid}_{session}_0" for session in range(sessions)]
        rows = [{"responses": torch.arange(3)}] * sessions
        if keys:
            queue.put(keys, "train", rows, [row_tag(1)] * sessions)
    status = "finished" if sessions == N else "failure"
    queue.put(uids, "train", tags=[{"status": status}] * len(uids))


def test_a_batch_has_verls_own_type_and_leaves_only_its_rows(train: Any) -> None:
    import transfer_queue

    uids = submit(train, 2)
    finish(train, uids)
    train.put([f"{uids[0]}_sess0"], "train", tags=[session_tag(0)])
    batch, metrics = buffer().sample(global_steps=1, partition_id="train", batch_size=2)
    assert type(batch) is transfer_queue.KVBatchMeta
    assert batch.keys == [f"{uid}_{session}_0" for uid in uids for session in range(N)]
    assert not any(metrics.values())
    batch.extra_info["temperature"] = 1.0  # as verl's trainer does
    assert sorted(train.list("train")) == sorted(batch.keys), "verl deletes the rows, and only them"


def test_a_sync_step_trains_on_what_drop_leaves(train: Any) -> None:
    complete, incomplete = submit(train, 2)
    finish(train, [complete])
    finish(train, [incomplete], sessions=1)
    batch, metrics = buffer(on_incomplete="drop").sample(1, "train", 2)
    assert {key.rsplit("_", 2)[0] for key in batch.keys} == {complete}
    assert metrics["training/rollout_failure/evicted_samples"] == 1


def test_refill_has_the_trainer_submit_fresh_prompts(train: Any) -> None:
    asked: list[int] = []

    def refill(prompts: int) -> int:
        asked.append(prompts)
        finish(train, submit(train, prompts))
        return prompts

    complete, incomplete = submit(train, 2)
    finish(train, [complete])
    finish(train, [incomplete], sessions=0)
    batch, metrics = buffer(on_incomplete="refill", refill=refill).sample(1, "train", 2)
    assert asked == [1]
    assert len({key.rsplit("_", 2)[0] for key in batch.keys} - {complete, incomplete}) == 1
    assert metrics["training/rollout_failure/refilled_samples"] == 1
