"""Role rollout_tq: a queue-based loop, once to generate and dump, once more to replay."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlskip import SkipManager
from rlskip._files import Folder
from rlskip.errors import ConfigError, MismatchError, MissError
from rlskip.jobs.records import tally
from rlskip.keys import ROLLOUT_ROOT_KEYS
from rlskip.queue import KVBatchMeta, MemoryQueue, to_rows
from rlskip.store.layout import part_name
from tests.faulty_files import flip
from tests.skip.trainers import Trainer, prompts, role_of, visit


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
    second = run(model, viable, at=1)
    second.n = 3
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


def test_nothing_but_uids_goes_by_position(dumped: Callable[..., Any]) -> None:
    def uids_only(n: int) -> dict[str, Any]:
        return {"uid": prompts(*"x" * n)["uid"]}

    batch = uids_only(3)
    trainer = dumped(batch, at=3)
    again = uids_only(3)
    trainer.submit(again)
    rows = to_rows(trainer.queue.get([f"{uid}_0_0" for uid in again["uid"]], "train"))
    assert [row["text"] for row in rows] == [f"{uid}/0/0" for uid in batch["uid"]]
    for n in (2, 4):
        visit(3)
        with pytest.raises(MismatchError, match=f"batch's {n} prompts: .* holds 3 groups"):
            trainer.submit(uids_only(n))
    assert trainer.submitted == []


def test_each_batch_of_a_step_gets_groups_of_its_own_identity(init: Callable[..., Path]) -> None:
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

    def step(*asked: int, **skip: Any) -> list[int]:
        """A run; which of the seeds were generated."""
        init("rollout_tq", at=1, **skip)
        trainer: Any = Seeded(MemoryQueue())
        seeds.clear()
        for trainer.seed in asked:
            trainer.submit(prompts("a"))
        trainer.buffer.clear(trainer.sample()[0])
        return [*seeds]

    assert step(1, 2) == [1, 2]
    assert step(2, 1) == []
    with pytest.raises(MismatchError, match=r"identity\.seed: 3 now, [12] in the dump"):
        step(3)
    assert step(2, 3, on_mismatch="regenerate") == [3], "it replaces what differs, and no other"
    assert step(3, 2) == []


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


def test_what_a_refused_batch_would_have_used_serves_the_next(dumped: Callable[..., Any]) -> None:
    trainer = dumped(prompts("a", "b"), match="prompt", on_miss="error")
    visit(3)
    for texts in ("ac", "bc"):
        with pytest.raises(MissError):
            trainer.submit(prompts(*texts))
    assert len(trainer.step(3, prompts("b", "a"))) == 6


def test_unlisted_steps_and_validation_leave_no_trace(init: Callable[..., Path]) -> None:
    dumps = init("rollout_tq", steps=[2])
    trainer = Trainer(MemoryQueue())
    trainer.step(1, prompts("a"))
    SkipManager.set_step(2)
    trainer.submit({**prompts("v"), "validate": True})
    assert not any("dump_step" in tag for tag in trainer.queue.list("train").values())
    trainer.sample()
    assert not list(dumps.rglob("gen_batch.dp"))


@pytest.mark.parametrize(
    ("fault", "lost"), [("damaged", 1), ("gone", 1), ("unreadable", 1), ("altered", 3)]
)
def test_a_part_that_cannot_be_used_costs_its_own_groups(
    fault: str, lost: int, init: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of later parts are replayed, and the batch is not refused for what a fault took.

    That rows are altered is found as they are loaded: the batch is generated.
    """

    def unreadable(folder: Folder, name: str, *args: Any) -> bytes:
        if folder.path == part:
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        return read(folder, name, *args)

    def submitted(*sizes: int) -> int:
        init("rollout_tq")
        trainer = Trainer(MemoryQueue())
        trainer.step(1, prompts(*"abc"), *sizes)
        return len(trainer.submitted)

    dumps, read = init("rollout_tq"), Folder.read
    assert submitted(1, 1, 1) == 3
    (part,) = dumps.rglob("1.part-1")
    if fault == "gone":
        shutil.rmtree(part)
    elif fault == "damaged":
        (part / "meta.json").write_bytes(b"{")
    elif fault == "altered":
        flip(part / "gen_batch.dp", 200)
    with monkeypatch.context() as faults:
        if fault == "unreadable":
            faults.setattr(Folder, "read", unreadable)
        assert submitted() == lost
    assert submitted() == 0


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


def test_options_are_checked_by_name(init: Callable[..., Path]) -> None:
    init("rollout_tq", at=1)
    for options, said in (
        ({"queu": MemoryQueue()}, "no option queu"),
        ({"queue": MemoryQueue(), "phase": "sampel"}, "phase 'sampel'"),
        ({}, "does not know the queue"),
    ):
        submit = SkipManager.annotate(role="rollout_tq", **options)(lambda prompts: None)
        with pytest.raises(ConfigError, match=said):
            submit(prompts("a"))
    with pytest.raises(ConfigError, match=r"skip\.rollout_tq\.match"):
        init("rollout_tq", match="run")


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
    trainer = run(at=1)
    weights = {"min_global_steps": 0, "max_global_steps": 1}
    batch = prompts("a")
    trainer.submit(batch)
    [thread.join() for thread in trainer.threads]
    trainer.queue.put([f"{batch['uid'][0]}_0_0"], "train", tags=[weights])
    trainer.buffer.clear(trainer.sample()[0])
    rows = {row["key"]: row for row in run(action="repeat").step(5, prompts("b"))}
    row = rows[0, 0]
    assert (row["min_global_steps"], row["max_global_steps"], row["global_steps"]) == (4, 5, 5)


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


def test_evicted_groups_are_dumped_with_their_place_and_replayed_with_it(
    run: Callable[..., Any],
) -> None:
    trainer = run(at=3)
    batch = prompts(*"abcd")
    trainer.submit(batch)
    evict(trainer, [batch["uid"][1]])
    meta = SkipManager.store("rollout_tq").read_meta(3)
    assert meta is None, "a dump of evicted groups alone serves no batch"
    refill(trainer, prompts("e"))
    trainer.buffer.clear(trainer.sample(4)[0])
    store = SkipManager.store("rollout_tq")
    sampled, evicted = (store.read_meta(3, part_name(k)).info["groups"] for k in (0, 1))
    assert [position for _, position, *_ in sampled] == [0, 2, 3, 4]
    assert [position for _, position, *_ in evicted] == [1]
    assert store.read_meta(3, part_name(2)) is None
    trainer = run(at=3)
    assert role_of("rollout_tq").prompts_dumped(3) == 5
    assert role_of("rollout_tq").prompts_dumped(4) == 0
    trainer.submit(prompts(*"abcde"))
    assert trainer.submitted == []
    trainer.buffer.clear(trainer.sample(5)[0])  # the queue is shared with the next run
    run(prompt_len=9, on_mismatch="regenerate")
    assert role_of("rollout_tq").prompts_dumped(3) == 0, "another config enlarges no batch"
    # A refill beyond the dump is generated.
    trainer = run(at=3)
    trainer.submit(prompts(*"abcd"))
    refill(trainer, prompts(*"exa"))
    assert trainer.submitted == ["x", "a"], "a's group has served already"
    trainer.buffer.clear(trainer.sample(7)[0])
    added = SkipManager.store("rollout_tq").read_meta(3, part_name(2)).info["groups"]
    assert [position for _, position, *_ in added] == [5, 6]
