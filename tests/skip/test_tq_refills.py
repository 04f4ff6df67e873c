"""Groups that a trainer evicts and replaces: dumped with their place, replayed with the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlskip import SkipManager
from rlskip.keys import ROLLOUT_ROOT_KEYS
from rlskip.queue import KVBatchMeta
from rlskip.store.layout import part_name
from tests.skip.trainers import prompts


@SkipManager.annotate(
    role="rollout_tq",
    stage="Trainer.submit",  # groups of one stage serve the other
    queue=lambda trainer, _: trainer.queue,
    phase="refill",
)
def refill(trainer: Any, prompts: Any) -> None:
    type(trainer).submit.__wrapped__(trainer, prompts)


@SkipManager.annotate(role="rollout_tq", queue=lambda trainer, _: trainer.queue, phase="evict")
def evicted(trainer: Any, uids: list[str]) -> KVBatchMeta:
    rows = {k: t for k, t in trainer.queue.list("train").items() if k.rsplit("_", 2)[0] in uids}
    return KVBatchMeta(list(rows), list(rows.values()), "train", None, {ROLLOUT_ROOT_KEYS: uids})


def evict(trainer: Any, uids: list[str]) -> None:
    [thread.join() for thread in trainer.threads]
    evicted(trainer, uids)
    trainer.buffer.evict(uids, "train")


def role() -> Any:
    return SkipManager.skip_instances["rollout_tq"]


@pytest.fixture
def first(run: Callable[..., Any]) -> Any:
    """A run whose step 3 evicted b and refilled e, and its uids."""
    trainer = run()
    SkipManager.set_step(3)
    batch = prompts(*"abcd")
    trainer.submit(batch)
    evict(trainer, [batch["uid"][1]])
    assert role().dumps.store.read_meta(3) is None, "a dump of evicted groups alone serves no batch"
    refill(trainer, prompts("e"))
    sampled, _ = trainer.sample(4)
    trainer.buffer.clear(sampled)
    return trainer


def test_evicted_groups_are_dumped_with_their_place(first: Any) -> None:
    sampled, evicted = (
        role().dumps.store.read_meta(3, part_name(k)).info["groups"] for k in (0, 1)
    )
    assert [position for _, position, _ in sampled] == [0, 2, 3, 4]
    assert [position for _, position, _ in evicted] == [1]
    assert role().dumps.store.read_meta(3, part_name(2)) is None


def test_a_batch_with_its_refills_is_replayed(first: Any, run: Any) -> None:
    trainer = run()
    SkipManager.set_step(3)
    assert role().prompts_dumped(3) == 5
    assert role().prompts_dumped(4) == 0
    trainer.submit(prompts(*"abcde"))
    assert trainer.submitted == []
    sampled, _ = trainer.sample(5)
    trainer.buffer.clear(sampled)  # the queue is shared with the next test


def test_a_refill_beyond_the_dump_is_generated(first: Any, run: Any) -> None:
    trainer = run()
    SkipManager.set_step(3)
    trainer.submit(prompts(*"abcd"))
    refill(trainer, prompts(*"exa"))
    assert trainer.submitted == ["x", "a"], "a's group has served already"
    sampled, _ = trainer.sample(7)
    trainer.buffer.clear(sampled)
    added = role().dumps.store.read_meta(3, part_name(2)).info["groups"]
    assert [position for _, position, _ in added] == [5, 6]


def test_another_config_enlarges_no_batch(first: Any, run: Any) -> None:
    run(prompt_len=9, on_mismatch="regenerate")
    assert role().prompts_dumped(3) == 0
