"""Role rollout_tq: misses, failures and refusals."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlskip import SkipManager
from rlskip.errors import ConfigError, MissError
from rlskip.queue import MemoryQueue
from tests.skip.trainers import Trainer, prompts


def test_on_miss_error_refuses_before_anything_is_submitted(init: Callable[..., Path]) -> None:
    init("rollout_tq")
    first = Trainer(MemoryQueue(), on_incomplete="min_viable", min_viable=1)
    first.fails = {("b", 0)}
    first.step(3, prompts("a", "b"))
    init("rollout_tq", on_miss="error")
    trainer = Trainer(MemoryQueue())
    with pytest.raises(MissError, match="step 4 has no usable dump"):
        trainer.step(4, prompts("a"))
    with pytest.raises(MissError, match="serves 1 of the batch's 2 prompts"):
        trainer.step(3, prompts("a", "b"))
    assert trainer.submitted == []
    assert trainer.queue.list("train") == {}


def test_unlisted_steps_and_validation_leave_no_trace(init: Callable[..., Path]) -> None:
    dumps = init("rollout_tq", steps=[2])
    trainer = Trainer(MemoryQueue())
    trainer.step(1, prompts("a"))
    SkipManager.set_step(2)
    trainer.submit({**prompts("v"), "validate": True})
    assert not any("dump_step" in tag for tag in trainer.queue.list("train").values())
    batch, _ = trainer.sample()
    assert not list(dumps.rglob("gen_batch.dp"))
    trainer.buffer.clear(batch)


def test_a_corrupt_part_is_a_miss(
    dumped: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = dumped(prompts(*"ab"))
    (dump,) = tmp_path.rglob("gen_batch.dp")
    data = bytearray(dump.read_bytes())
    data[len(data) // 2] ^= 1
    dump.write_bytes(data)
    rows = trainer.step(3, prompts(*"ba"))
    assert trainer.submitted == ["b", "a"]
    assert "counts as a miss" in caplog.text
    assert trainer.step(3, prompts(*"ab")) == rows
    assert trainer.submitted == ["b", "a"]


def test_another_writer_at_the_same_number(run: Callable[..., Any], tmp_path: Path) -> None:
    """Both parts stay: the second takes the next number."""
    run().step(1, prompts("a"))
    second = run(on_mismatch="regenerate")
    store = SkipManager.store("rollout_tq")
    step, aside = store.directory / "1", tmp_path / "aside"
    step.rename(aside)
    write = store.write

    def write_second(*args: Any, **kwargs: Any) -> Any:
        if aside.exists():
            aside.rename(step)  # the other writes after this one has looked
        return write(*args, **kwargs)

    store.write = write_second  # type: ignore[method-assign]
    second.step(1, prompts("b"))
    third = run()
    third.step(1, prompts("b", "a"))
    assert third.submitted == []


def test_drop_fields(dumped: Callable[..., Any]) -> None:
    trainer = dumped(prompts("a"), drop_fields=["rm_scores"])
    assert {row["rm_scores"] for row in trainer.step(3, prompts("a"))} == {-1.0}
    assert trainer.submitted == []


def test_restore_rng(init: Callable[..., Path]) -> None:
    drawn = []
    for _ in range(2):
        init("rollout_tq", restore_rng=True)
        Trainer(MemoryQueue()).step(1, prompts("a"))
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert drawn[0] == drawn[1]


def test_options_are_checked_by_name(init: Callable[..., Path]) -> None:
    init("rollout_tq")
    SkipManager.set_step(1)
    for options, said in (
        ({"queu": MemoryQueue()}, "no option queu"),
        ({"queue": MemoryQueue(), "phase": "sampel"}, "phase 'sampel'"),
        ({}, "does not know the queue"),
    ):

        @SkipManager.annotate(role="rollout_tq", **options)
        def submit(prompts: Any) -> None: ...

        with pytest.raises(ConfigError, match=said):
            submit(prompts("a"))


def test_rows_arrive_in_the_order_in_which_they_were_sampled(run: Callable[..., Any]) -> None:
    def sampled(trainer: Any, batch: dict[str, Any]) -> list[tuple[int, str]]:
        SkipManager.set_step(1)
        trainer.submit(batch)
        [thread.join() for thread in trainer.threads]
        here = [key for key in trainer.queue.list("train") if key.count("_") == 3]
        trainer.sample()
        return [(batch["uid"].index(key.rsplit("_", 2)[0]), key[-3:]) for key in here]

    first = run()
    in_order = first.buffer.sample

    def backwards(*which: Any) -> Any:
        batch, metrics = in_order(*which)
        return replace(batch, keys=batch.keys[::-1], tags=batch.tags[::-1]), metrics

    first.buffer.sample = backwards  # type: ignore[method-assign]
    sampled(first, prompts("a", "b"))
    first.queue.delete(list(first.queue.list("train")), "train")
    rows = ["1_1", "1_0", "0_0"]
    again = sampled(run(), prompts("a", "b"))
    assert again == [(1, row) for row in rows] + [(0, row) for row in rows]


def test_repeat_counts_all_steps_from_the_present_one(run: Callable[..., Any]) -> None:
    trainer = run()
    weights = {"min_global_steps": 0, "max_global_steps": 1}
    SkipManager.set_step(1)
    batch = prompts("a")
    trainer.submit(batch)
    [thread.join() for thread in trainer.threads]
    trainer.queue.put([f"{batch['uid'][0]}_0_0"], "train", tags=[weights])
    trainer.buffer.clear(trainer.sample()[0])
    rows = {row["key"]: row for row in run(action="repeat").step(5, prompts("b"))}
    row = rows[0, 0]
    assert (row["min_global_steps"], row["max_global_steps"], row["global_steps"]) == (4, 5, 5)
