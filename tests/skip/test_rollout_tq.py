"""Role rollout_tq: a queue-based loop, once to generate and dump, once more to replay."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from rlskip import SkipManager
from rlskip.errors import ConfigError, MismatchError, MissError
from rlskip.keys import prompt_tag, row_tag, session_tag, status_tag
from rlskip.queue import MemoryQueue, TransferQueueAdapter, to_rows
from rlskip.replay import ReplayBuffer
from rlskip.skip.prompts import PromptsError, contents_of, select, uids_of
from rlskip.skip.records import tally

_generated = itertools.count(1)


class Trainer:
    """Submits prompts to threads that write rows and markers; samples the real buffer."""

    def __init__(self, queue: Any, model: str = "counted", **replay: Any) -> None:
        self.queue, self.model, self.n = queue, model, 2
        self.buffer = ReplayBuffer(queue, {"replay": {"timeout_s": 20.0, **replay}})
        self.threads: list[threading.Thread] = []
        self.submitted: list[str] = []
        self.fails: set[tuple[str, int]] = set()  # (text, session id)

    @SkipManager.annotate(role="rollout_tq", queue=lambda self, *_, **__: self.queue)
    def submit(self, prompts: dict[str, Any]) -> str:
        step = SkipManager.step or 0
        uids, texts = list(prompts["uid"]), list(prompts.get("text", prompts["uid"]))
        self.submitted += texts
        counted = self.model == "counted"
        tag = prompt_tag(step, self.n) if counted else status_tag(step, "pending", self.n)
        self.queue.put(uids, "train", tags=[tag] * len(uids))
        for uid, text in zip(uids, texts, strict=True):
            self.threads.append(threading.Thread(target=self._prompt, args=(step, uid, text)))
            self.threads[-1].start()
        return "submitted"

    def _prompt(self, step: int, uid: str, text: str) -> None:
        for session_id in range(self.n):
            error = "tool died" if (text, session_id) in self.fails else None
            rows = range(0 if error else 1 + session_id)  # session 1 writes two rows
            if rows:
                fields = [
                    {
                        "uid": uid,
                        "text": f"{text}/{session_id}/{index}",
                        "responses": torch.full((2 + index,), next(_generated)),
                        "rm_scores": torch.tensor(float(session_id)),
                    }
                    for index in rows
                ]
                keys = [f"{uid}_{session_id}_{index}" for index in rows]
                tags = [row_tag(step, length=2 + index) for index in rows]
                self.queue.put(keys, "train", fields, tags)
            if self.model == "counted" or error:
                marker = session_tag(session_id, error=error)
                self.queue.put([f"{uid}_sess{session_id}"], "train", tags=[marker])
        if self.model != "counted":
            failed = any((text, s) in self.fails for s in range(self.n))
            status = "failure" if failed else "finished"
            self.queue.put([uid], "train", tags=[{"status": status}])

    @SkipManager.annotate(
        role="rollout_tq", phase="sample", queue=lambda self, *_, **__: self.queue
    )
    def sample(self, batch_size: int | None = None, partition_id: str = "train") -> Any:
        return self.buffer.sample(SkipManager.step or 0, partition_id, batch_size)

    def step(self, step: int, prompts: Any, *sizes: int | None) -> list[dict[str, Any]]:
        """One step of training; what it would train on, row by row."""
        SkipManager.set_step(step)
        self.submit(prompts)
        asked = dict(zip(prompts["uid"], prompts.get("text", prompts["uid"]), strict=True))
        rows = []
        for size in sizes or (None,):
            if len(sizes) > 1:
                [thread.join() for thread in self.threads]  # so that each takes what it can
            batch, _ = self.sample(size)
            data = to_rows(self.queue.get(batch.keys, "train"))
            for key, tag, row in zip(batch.keys, batch.tags, data, strict=True):
                uid, session_id, index = key.rsplit("_", 2)
                assert row.pop("uid") == uid, "the field follows the key"
                row["responses"] = row["responses"].tolist()
                row["rm_scores"] = float(row.get("rm_scores", -1))
                rows.append(
                    {**row, **tag, "key": (int(session_id), int(index)), "prompt": asked[uid]}
                )
            self.buffer.clear(batch)
        [thread.join() for thread in self.threads]
        assert not any(self.queue.list("train")), "the clean-up leaves nothing behind"
        return sorted(rows, key=lambda row: row["text"])


@pytest.fixture(scope="module")
def transfer_queue() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    tq = pytest.importorskip("transfer_queue")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield TransferQueueAdapter()
    tq.close()
    ray.shutdown()


@pytest.fixture(
    params=["memory", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.timeout(180)])]
)
def queue(request: pytest.FixtureRequest) -> Any:
    if request.param == "ray":
        return request.getfixturevalue("transfer_queue")
    return MemoryQueue()


@pytest.fixture
def run(queue: Any, init: Callable[..., Path]) -> Callable[..., Trainer]:
    """A run of its own: ``run(model, replay={...}, **skip)``."""

    def start(model: str = "counted", replay: Any = None, **skip: Any) -> Trainer:
        init("rollout_tq", **skip)
        return Trainer(queue, model, **(replay or {}))

    return start


_uids = itertools.count()


def prompts(*texts: str) -> dict[str, Any]:
    """A batch under uids that were never used before (with an underscore)."""
    return {"uid": [f"u_{next(_uids)}" for _ in texts], "text": list(texts)}


def uids_only(n: int) -> dict[str, Any]:
    return {"uid": prompts(*"x" * n)["uid"]}


# -- end to end ----------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["counted", "status"])
def test_the_second_run_generates_nothing_and_trains_on_the_same(
    run: Callable[..., Trainer], model: str, tmp_path: Path
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
def test_several_samples_a_step_are_kept_apart_and_merged(
    run: Callable[..., Trainer], model: str, tmp_path: Path
) -> None:
    first = run(model)
    rows = first.step(1, prompts(*"abcd"), 2, 2)
    parts = sorted(p.parent.name for p in tmp_path.rglob("gen_batch.dp"))
    assert parts == ["0", "1"]
    second = run(model)
    assert second.step(1, prompts(*"dbca"), 1, 3) == rows
    assert second.submitted == []
    assert sorted(p.parent.name for p in tmp_path.rglob("gen_batch.dp")) == parts


@pytest.mark.parametrize("model", ["counted", "status"])
def test_a_short_group_is_a_miss_for_that_group_only(
    run: Callable[..., Trainer], model: str, tmp_path: Path
) -> None:
    viable = {"on_incomplete": "min_viable", "min_viable": 1}
    first = run(model, viable)
    first.fails = {("b", 0)}
    rows = first.step(1, prompts(*"abc"))
    assert len(rows) == 8
    second = run(model)  # would raise on a short group
    again = second.step(1, prompts(*"cba"))
    assert second.submitted == ["b"]
    assert [row for row in again if row["text"][0] != "b"] == [
        r for r in rows if r["text"][0] != "b"
    ]
    assert [row["key"] for row in again if row["text"][0] == "b"] == [(0, 0), (1, 0), (1, 1)]
    third = run(model)
    assert third.step(1, prompts(*"abc")) == again, "the new group has taken its place"
    assert third.submitted == []


@pytest.mark.parametrize("model", ["counted", "status"])
def test_a_recorded_failure_stays_a_failure(run: Callable[..., Trainer], model: str) -> None:
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


def test_a_sampler_that_waits_never_takes_half_a_step(run: Callable[..., Trainer]) -> None:
    viable = {"on_incomplete": "min_viable", "min_viable": 1}
    first = run(replay=viable)
    first.fails = {("b", 0)}
    first.step(1, prompts(*"abc"))
    second = run()
    SkipManager.set_step(1)
    batches = []
    sampler = threading.Thread(target=lambda: batches.append(second.sample()[0]))
    sampler.start()
    put, later = second.queue.put, []

    def slow(keys: Any, partition: str, *args: Any, **kwargs: Any) -> Any:
        """The roots of the rest come late, long after whatever is replayed."""
        tags = kwargs.get("tags") or [{}]
        if "n" in tags[0] and "replayed" not in tags[0] and not later:
            later.append(keys)
            sampler.join(0.3)
        return put(keys, partition, *args, **kwargs)

    second.queue.put = slow
    try:
        second.submit(prompts(*"abc"))
        sampler.join()
    finally:
        second.queue.put = put
    assert later
    assert len(batches[0].extra_info["rollout_root_keys"]) == 3
    second.buffer.clear(batches[0])


# -- which group for which prompt ----------------------------------------------------------


@pytest.fixture
def dumped(init: Callable[..., Path]) -> Callable[..., Trainer]:
    """A MemoryQueue's run whose step 3 dumped these prompts; then a fresh run with `skip`."""

    def start(batch: dict[str, Any], **skip: Any) -> Trainer:
        init("rollout_tq")
        Trainer(MemoryQueue()).step(3, batch)
        init("rollout_tq", **skip)
        return Trainer(MemoryQueue())

    return start


def test_a_dump_that_cannot_serve_the_batch_is_refused(dumped: Callable[..., Trainer]) -> None:
    trainer = dumped(prompts(*"abc"))
    with pytest.raises(MismatchError) as caught:
        trainer.step(3, prompts(*"abcde"))
    text = str(caught.value)
    assert "the dump of step 3 serves 3 of the batch's 5 prompts" in text
    for way in ("on_mismatch=regenerate", "on_mismatch=ignore", "skip.dump_dir"):
        assert way in text
    assert trainer.submitted == []
    assert trainer.queue.list("train") == {}


def test_sampling_asked_for_in_the_prompts_meta_counts(dumped: Callable[..., Trainer]) -> None:
    trainer = dumped({**prompts("a"), "meta_info": {"global_steps": 3}})
    trainer.step(3, {**prompts("a"), "meta_info": {"global_steps": 4}})
    with pytest.raises(MismatchError, match="serves 0 of the batch's 1"):
        trainer.step(3, {**prompts("a"), "meta_info": {"do_sample": False}})
    assert trainer.submitted == []


def test_regenerate_submits_what_is_missing_and_adds_it(dumped: Callable[..., Trainer]) -> None:
    trainer = dumped(prompts(*"abc"), on_mismatch="regenerate")
    rows = trainer.step(3, prompts(*"edcba"))
    assert trainer.submitted == ["e", "d"]
    assert trainer.step(3, prompts(*"abcde")) == rows
    assert trainer.submitted == ["e", "d"]


def test_ignore_goes_by_position(dumped: Callable[..., Trainer]) -> None:
    trainer = dumped(prompts(*"abc"), on_mismatch="ignore")
    rows = trainer.step(3, prompts("x", "y"))
    assert {row["text"][0] for row in rows} == {"a", "b"}
    with pytest.raises(MismatchError, match="serves 0 of the batch's 4"):
        trainer.step(3, prompts(*"vxyz"))
    assert trainer.submitted == []


def test_the_same_prompt_twice_gets_two_groups(dumped: Callable[..., Trainer]) -> None:
    trainer = dumped(prompts("a", "a", "b"))
    rows = trainer.step(3, prompts("a", "b", "a"))
    assert len({tuple(row["responses"]) for row in rows if row["text"] == "a/0/0"}) == 2
    with pytest.raises(MismatchError, match="serves 2 of the batch's 3"):
        trainer.step(3, prompts("a", "b", "b"))


def test_nothing_but_uids_goes_by_position(dumped: Callable[..., Trainer]) -> None:
    batch = uids_only(3)
    trainer = dumped(batch)
    SkipManager.set_step(3)
    again = uids_only(3)
    trainer.submit(again)
    rows = to_rows(trainer.queue.get([f"{uid}_0_0" for uid in again["uid"]], "train"))
    assert [row["text"] for row in rows] == [f"{uid}/0/0" for uid in batch["uid"]]
    for n in (2, 4):
        with pytest.raises(MismatchError, match=f"3 groups for the batch's {n} prompts"):
            trainer.submit(uids_only(n))
    assert trainer.submitted == []


def test_other_sampling_is_refused(tmp_path: Path) -> None:
    def start(temperature: float) -> Trainer:
        host = {"actor_rollout_ref": {"rollout": {"temperature": temperature}}}
        skip = {"dump_dir": str(tmp_path), "rollout_tq": {"enable": True}}
        SkipManager.init({**host, "skip": skip})
        return Trainer(MemoryQueue())

    start(1.0).step(1, prompts("a"))
    with pytest.raises(MismatchError, match=r"sampling.temperature: 0.7 now, 1.0 in the dump"):
        start(0.7).step(1, prompts("a"))


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
    dumped: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
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


def test_groups_go_to_the_dump_of_the_step_that_submitted_them(run: Callable[..., Trainer]) -> None:
    def train(trainer: Trainer) -> list[list[str]]:
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


def test_a_prompt_submitted_again_in_the_first_run_is_no_mismatch(
    run: Callable[..., Trainer],
) -> None:
    """A refill after a part of the step was dumped already."""
    trainer = run()
    trainer.step(1, prompts(*"abc"))
    assert {row["text"][0] for row in trainer.step(1, prompts("d"))} == {"d"}
    again = run()
    again.step(1, prompts(*"dcba"))
    assert again.submitted == []


# -- misses, failures, refusals ------------------------------------------------------------


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
    dumped: Callable[..., Trainer], tmp_path: Path, caplog: pytest.LogCaptureFixture
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


def test_a_dump_that_fails_costs_a_warning(
    init: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    dumps = init("rollout_tq")
    role: Any = SkipManager.skip_instances["rollout_tq"]

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    role.store.save = full
    assert len(Trainer(MemoryQueue()).step(1, prompts("a"))) == 3
    assert "NOT dumped, training goes on" in caplog.text
    assert not list(dumps.rglob("gen_batch.dp"))


def test_another_writer_at_the_same_number(run: Callable[..., Trainer], tmp_path: Path) -> None:
    """Both parts stay: the second takes the next number."""
    first, role = run(), None
    first.step(1, prompts("a"))
    second = run(on_mismatch="regenerate")
    role = SkipManager.skip_instances["rollout_tq"]
    parts = role._parts  # type: ignore[attr-defined]
    SkipManager.set_step(1)
    second.submit(prompts("b"))
    role._parts = lambda step: []  # type: ignore[attr-defined] - as it was before the other wrote
    batch, _ = second.sample()
    role._parts = parts  # type: ignore[attr-defined]
    second.buffer.clear(batch)
    third = run()
    third.step(1, prompts("b", "a"))
    assert third.submitted == []


def test_drop_fields(dumped: Callable[..., Trainer]) -> None:
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


def test_async_stages(init: Callable[..., Path]) -> None:
    queue = MemoryQueue()
    inner = Trainer(queue)
    option = {"role": "rollout_tq", "queue": queue}

    @SkipManager.annotate(**option)
    async def submit(prompts: Any) -> None:
        Trainer.submit.__wrapped__(inner, prompts)  # type: ignore[attr-defined]

    @SkipManager.annotate(**option, phase="sample")
    async def sample() -> Any:
        return await asyncio.to_thread(inner.buffer.sample, 1, "train")

    async def main(*texts: str) -> int:
        await submit(prompts(*texts))
        batch, _ = await sample()
        inner.buffer.clear(batch)
        return len(batch)

    for texts in ("ab", "ba", "bac"):
        init("rollout_tq", on_mismatch="regenerate")
        SkipManager.set_step(1)
        assert asyncio.run(main(*texts)) == 3 * len(texts)
    assert inner.submitted == ["a", "b", "c"]


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


# -- prompts, row by row -------------------------------------------------------------------


def batches() -> list[Any]:
    ids = [torch.arange(1 + i) for i in range(3)]
    jagged = torch.nested.as_nested_tensor(ids, layout=torch.jagged)
    plain = torch.arange(6).reshape(3, 2)
    names = np.array(["p", "q", "r"], dtype=object)
    tensors = TensorDict({"uid": NonTensorStack("a", "b", "c"), "ids": jagged, "x": plain}, [3])
    proto = type("DataProto", (), {})()
    proto.batch = TensorDict({"x": plain}, [3])
    proto.non_tensor_batch = {"uid": np.array(["a", "b", "c"], dtype=object), "name": names}
    proto.meta_info = {}
    return [
        tensors,
        proto,
        {"uid": ["a", "b", "c"], "ids": ids, "x": plain, "name": names, "temperature": 1.0},
        {"uid": np.array(["a", "b", "c"]), "ids": jagged},
        [{"uid": uid, "x": i} for i, uid in enumerate("abc")],
    ]


@pytest.mark.parametrize("batch", batches(), ids=["td", "proto", "dict", "jagged", "rows"])
def test_some_rows_of_a_batch(batch: Any) -> None:
    some = select(batch, [2, 0])
    assert type(some) is type(batch)
    assert (uids_of(batch), uids_of(some)) == (["a", "b", "c"], ["c", "a"])
    contents = contents_of(batch, {})
    assert len(set(contents)) == 3
    assert contents_of(some, {}) == [contents[2], contents[0]]
    assert contents_of(batch, {"seed": 1}) != contents


def test_prompts_without_uids_or_with_one_twice() -> None:
    with pytest.raises(PromptsError, match="no uids"):
        uids_of({"ids": [1, 2]})
    with pytest.raises(PromptsError, match="given twice: a"):
        uids_of({"uid": ["a", "a"]})
    assert contents_of({"uid": ["a", "b"], "global_steps": [1, 1]}, {}) == [None, None]


def test_rows_arrive_in_the_order_in_which_they_were_sampled(run: Callable[..., Trainer]) -> None:
    def sampled(trainer: Trainer, batch: dict[str, Any]) -> list[tuple[int, str]]:
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
        batch.reorder(range(len(batch))[::-1])
        return batch, metrics

    first.buffer.sample = backwards  # type: ignore[method-assign]
    sampled(first, prompts("a", "b"))
    first.queue.clear(list(first.queue.list("train")), "train")
    rows = ["1_1", "1_0", "0_0"]
    again = sampled(run(), prompts("a", "b"))
    assert again == [(1, row) for row in rows] + [(0, row) for row in rows]


def test_repeat_counts_all_steps_from_the_present_one(run: Callable[..., Trainer]) -> None:
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
