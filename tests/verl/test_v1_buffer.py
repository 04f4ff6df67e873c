"""The buffer behind verl's `custom_sampler`, on a real TransferQueue: local Ray, no verl."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlskip.config.replay import ReplayConfig
from rlskip.errors import ConfigError
from rlskip.keys import row_tag, session_tag, status_tag
from rlskip.replay import IncompleteRolloutError, ReplayTimeoutError

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

N = 2
_uids = itertools.count()


@pytest.fixture(scope="module")
def queue() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    transfer_queue = pytest.importorskip("transfer_queue")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    from rlskip.hosts import verl_v1

    verl_v1._join_queue.cache_clear()
    yield verl_v1.queue()
    verl_v1._join_queue.cache_clear()
    transfer_queue.close()
    ray.shutdown()


@pytest.fixture
def train(queue: Any) -> Any:
    """The partition, emptied afterwards."""
    yield queue
    queue.clear(list(queue.list("train")), "train")


def buffer(mode: str = "sync", refill: Any = None, **replay: Any) -> Any:
    """As verl's trainer makes it, by keyword."""
    from rlskip.hosts.verl_replay import FailClosedReplayBuffer

    settings = ReplayConfig(n=N, val_n=N, timeout_s=5.0, **replay)
    return FailClosedReplayBuffer(
        trainer_mode=mode,
        trainer_config={},
        max_off_policy_threshold=2,
        max_off_policy_strategy="drop",
        sampler_kwargs=dataclasses.asdict(settings),
        refill_fn=refill,
    )


def submit(queue: Any, prompts: int, step: int = 1) -> list[str]:
    """As verl's trainer and worker do: the root pending, then a bare status; names as theirs."""
    uids = [f"p-{next(_uids)}" for _ in range(prompts)]
    queue.put(uids, "train", tags=[status_tag(step, "pending")] * prompts)
    queue.put(uids, "train", tags=[{"status": "running"}] * prompts)
    return uids


def finish(queue: Any, uids: list[str], step: int = 1, sessions: int = N) -> None:
    for uid in uids:
        keys = [f"{uid}_{session}_0" for session in range(sessions)]
        rows = [{"responses": torch.arange(3)}] * sessions
        if keys:
            queue.put(keys, "train", rows, [row_tag(step)] * sessions)
    status = "finished" if sessions == N else "failure"
    queue.put(uids, "train", tags=[{"status": status}] * len(uids))


def test_a_batch_is_verls_own_kind_and_leaves_only_its_rows(train: Any) -> None:
    import transfer_queue

    uids = submit(train, 2)
    finish(train, uids)
    train.put([f"{uids[0]}_sess0"], "train", tags=[session_tag(0)])
    batch, metrics = buffer().sample(global_steps=1, partition_id="train", batch_size=2)
    assert type(batch) is transfer_queue.KVBatchMeta
    assert batch.keys == [f"{uid}_{session}_0" for uid in uids for session in range(N)]
    assert not any(metrics.values())
    batch.extra_info["temperature"] = 1.0  # as verl's trainer does
    assert sorted(train.list("train")) == sorted(batch.keys), "verl clears the rows, and only them"


def test_a_short_group_is_no_batch(train: Any) -> None:
    whole, short = submit(train, 2)
    finish(train, [whole])
    finish(train, [short], sessions=1)
    with pytest.raises(IncompleteRolloutError, match=f"{short}: expected 2, got 1"):
        buffer().sample(1, "train", 2)


def test_a_sync_step_trains_on_what_drop_leaves(train: Any) -> None:
    whole, short = submit(train, 2)
    finish(train, [whole])
    finish(train, [short], sessions=1)
    batch, metrics = buffer(on_incomplete="drop").sample(1, "train", 2)
    assert {key.rsplit("_", 2)[0] for key in batch.keys} == {whole}
    assert metrics["training/rollout_failure/evicted_samples"] == 1


def test_refill_has_the_trainer_submit_fresh_prompts(train: Any) -> None:
    asked: list[int] = []

    def refill(prompts: int) -> int:
        asked.append(prompts)
        finish(train, submit(train, prompts))
        return prompts

    whole, short = submit(train, 2)
    finish(train, [whole])
    finish(train, [short], sessions=0)
    batch, metrics = buffer(on_incomplete="refill", refill=refill).sample(1, "train", 2)
    assert asked == [1]
    assert len({key.rsplit("_", 2)[0] for key in batch.keys} - {whole, short}) == 1
    assert metrics["training/rollout_failure/refilled_samples"] == 1


def test_prompts_that_say_how_many_sessions_they_get_are_held_to_that(train: Any) -> None:
    """Beside verl's own manager, which leaves nothing of it in the queue."""
    from omegaconf import OmegaConf
    from tensordict import NonTensorStack, TensorDict

    from rlskip.hosts.verl_v1 import OUR_SAMPLER, _expecting

    uids = submit(train, 2)
    config = OmegaConf.create({"trainer": {"v1": {"sampler": {"custom_sampler": OUR_SAMPLER}}}})
    prompts = {"uid": NonTensorStack(*uids), "__rollout_n__": torch.tensor([N, N + 1])}

    class Manager:
        def __init__(self) -> None:
            self.config = config

        @_expecting
        def generate_sequences(self, prompts: TensorDict) -> None:
            finish(train, prompts["uid"])

    Manager().generate_sequences(TensorDict(prompts, batch_size=2))
    with pytest.raises(IncompleteRolloutError, match=f"{uids[1]}: expected 3, got 2") as error:
        buffer().sample(1, "train", 2)
    assert [outcome.uid for outcome in error.value.prompts] == [uids[1]]


def test_verls_staleness_counts_in_async_modes_only(train: Any) -> None:
    finish(train, submit(train, 1, step=1))
    assert buffer("sync").get_sampleable_count(5, "train") == 1
    assert buffer("colocate_async").get_sampleable_count(5, "train") == 0
    assert buffer("colocate_async").get_sampleable_count(2, "train") == 1
    with pytest.raises(ReplayTimeoutError):
        buffer("colocate_async").sample(5, "train", 1)


def test_without_the_number_of_sessions_it_is_not_made(queue: Any) -> None:
    from rlskip.hosts.verl_replay import FailClosedReplayBuffer

    with pytest.raises(ConfigError, match="sampler_kwargs"):
        FailClosedReplayBuffer("sync", {}, None, "drop", {}, None)
