"""Role rollout_tq: a queue-based loop, once to generate and dump, once more to replay."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlskip import SkipManager
from rlskip.errors import MismatchError
from rlskip.jobs.records import tally
from rlskip.queue import MemoryQueue, to_rows
from tests.skip.trainers import Trainer, prompts, uids_only, visit

# -- end to end ---------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["counted", "status"])
def test_the_second_run_generates_nothing_and_trains_on_the_same(
    run: Callable[..., Any], model: str, tmp_path: Path
) -> None:
    first = run(model)
    rows = [first.step(step, prompts("a", "b", f"c{step}")) for step in (1, 2)]
    assert len(rows[0]) == 9, "two sessions, the second of two rows"
    second = run(model)
    again = [second.step(step, prompts(f"c{step}", "b", "a")) for step in (1, 2)]
    assert again == rows
    assert second.submitted == []
    counts = tally({"rollout_tq": str(tmp_path / "dumps")}, "job")["rollout_tq"]
    assert (counts.hits, counts.misses) == (2, 2)
    assert counts.bytes_read == counts.bytes_written > 0


@pytest.mark.parametrize("model", ["counted", "status"])
def test_a_recorded_failure_stays_a_failure(run: Callable[..., Any], model: str) -> None:
    """A group with enough sessions, one of which failed: two of three are expected."""
    viable = {"on_incomplete": "min_viable", "min_viable": 2}

    class Generous(Trainer):
        def _prompt(self, step: int, uid: str, text: str) -> None:
            self.queue.put([uid], "train", tags=[{"expected_rollouts": 2}])
            super()._prompt(step, uid, text)

    first = run(model, viable)
    first.__class__ = Generous
    first.n, first.fails = 3, {("a", 1)}
    rows = first.step(1, prompts("a"))
    assert {row["key"][0] for row in rows} == {0, 2}
    second = run(model, viable)
    second.n = 3
    SkipManager.set_step(1)
    batch = prompts("a")
    second.submit(batch)
    (uid,) = batch["uid"]
    tags = second.queue.list("train")
    assert tags[f"{uid}_sess1"]["error"] == "tool died"
    assert tags[f"{uid}_sess1"]["status"] == "failure"
    assert tags[uid].get("status") == (None if model == "counted" else "failure")
    assert tags[uid]["replayed"] == 1
    assert "dump_step" not in tags[uid]
    (sampled, metrics) = second.sample()
    assert metrics["training/rollout_failure/short_samples"] == 1, "judged as it was"
    second.buffer.clear(sampled)


# -- which group for which prompt ---------------------------------------------------------


def test_nothing_but_uids_goes_by_position(dumped: Callable[..., Any]) -> None:
    batch = uids_only(3)
    trainer = dumped(batch)
    SkipManager.set_step(3)
    again = uids_only(3)
    trainer.submit(again)
    rows = to_rows(trainer.queue.get([f"{uid}_0_0" for uid in again["uid"]], "train"))
    assert [row["text"] for row in rows] == [f"{uid}/0/0" for uid in batch["uid"]]
    for n in (2, 4):
        visit(3)
        with pytest.raises(MismatchError, match=f"batch's {n} prompts: .* holds 3 groups"):
            trainer.submit(uids_only(n))
    assert trainer.submitted == []


def test_identity_counts_as_content(init: Callable[..., Path]) -> None:
    init("rollout_tq", on_mismatch="regenerate")
    seeds = []

    class Seeded(Trainer):
        @SkipManager.annotate(
            role="rollout_tq",
            queue=lambda self, *_, **__: self.queue,
            identity=lambda self, prompts: {"seed": self.seed},
        )
        def submit(self, prompts: Any) -> None:
            seeds.append(self.seed)
            Trainer.submit.__wrapped__(self, prompts)  # type: ignore[attr-defined]

    trainer = Seeded(MemoryQueue())
    for trainer.seed in (1, 2, 1, 2):  # type: ignore[attr-defined]
        trainer.step(1, prompts("a"))
    assert seeds == [1, 2]


def test_repeat_takes_the_nearest_step_by_position(
    dumped: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    trainer = dumped(prompts(*"abc"), action="repeat")
    for step in (7, 1):
        rows = trainer.step(step, prompts("x", "y"))
        assert {row["text"][0] for row in rows} == {"a", "b"}
        assert {row["global_steps"] for row in rows} == {step}, "fresh as of the present step"
    assert "step 7 REPEATS step 3" in caplog.text
    with pytest.raises(MismatchError, match="the dump of step 3 serves 3 of the batch's 4"):
        trainer.step(7, prompts(*"vxyz"))
    assert trainer.submitted == []


def test_groups_go_to_the_dump_of_the_step_that_submitted_them(run: Callable[..., Any]) -> None:
    def train(trainer: Any) -> list[list[str]]:
        """Two batches ahead, and one sample across both."""
        for step, texts in ((1, "ab"), (2, "cd")):
            SkipManager.set_step(step)
            trainer.submit(prompts(*texts))
        [thread.join() for thread in trainer.threads]
        samples = []
        for size in (1, 3):
            batch, _ = trainer.sample(size)
            data = to_rows(trainer.queue.get(batch.keys, "train", ["text"]))
            samples.append(sorted({row["text"][0] for row in data}))
            trainer.buffer.clear(batch)
        return samples

    assert train(run()) == [["a"], ["b", "c", "d"]]
    second = run()
    assert train(second) == [["a"], ["b", "c", "d"]]
    assert second.submitted == []
