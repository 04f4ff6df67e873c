"""Role `rollout_val`: validation is a call of its own step, or groups in a partition of its own."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from rlskip import SkipManager
from rlskip.errors import ConfigError, MismatchError, MissError
from rlskip.keys import row_tag, status_tag
from rlskip.queue import KVBatchMeta, MemoryQueue, to_rows
from tests.skip.trainers import prompts

Prompts = Callable[..., dict[str, Any]]
HOST = {
    "actor_rollout_ref": {
        "rollout": {"n": 2, "temperature": 1.0, "val_kwargs": {"n": 1, "temperature": 0.5}}
    }
}


def init(dump_dir: Path, role: str = "rollout", host: Any = None, at: int = 0, **skip: Any) -> None:
    node = {"dump_dir": str(dump_dir), "validation": "replay", role: {"enable": True}, **skip}
    SkipManager.init({**(host or HOST), "skip": node})
    SkipManager.set_step(at)


class Calls:
    """A loop whose functions return a batch."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _run(self, name: str) -> torch.Tensor:
        self.calls.append(name)
        return torch.tensor(len(self.calls))

    @SkipManager.annotate(role="rollout")
    def generate(self, prompts: dict[str, Any]) -> torch.Tensor:
        return self._run("train")

    @SkipManager.annotate(role="rollout_val")
    def validate(self, prompts: dict[str, Any]) -> torch.Tensor:
        return self._run("val")

    def train(self) -> list[int]:
        """Validate before training and after each of two steps, in two batches."""
        seen = []
        for step in (0, 1, 2):
            SkipManager.set_step(step)
            batches = [{"ids": [7, i], "validate": True} for i in (0, 1)]
            seen += [self.generate({"ids": [step]})] if step else []
            seen += [self.validate(batch) for batch in batches]
        return [int(value) for value in seen]


def test_validation_is_replayed_batch_by_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    init(tmp_path, steps=[1, 2])
    first = Calls()
    seen = first.train()
    assert (first.calls.count("train"), first.calls.count("val")) == (2, 6)
    init(tmp_path, steps=[1, 2], start_engine=False)
    second = Calls()
    assert (second.train(), second.calls) == (seen, [])
    assert "replayed validation does not show how the weights have changed since" in caplog.text
    [run] = tmp_path.glob("*/GBS*")
    assert sorted(path.name for path in run.iterdir() if path.name[0] != ".") == [
        "1", "2", "dumps.index", "rollout_val",
    ]  # fmt: skip
    assert len([*run.glob("rollout_val/0.*-0/gen_batch.dp")]) == 1


def test_no_other_steps_dump_shows_a_validation(tmp_path: Path) -> None:
    calls = Calls()
    init(tmp_path, match="run")
    seen = calls.train()
    assert (calls.calls.count("train"), calls.calls.count("val")) == (2, 6)
    for match in ("prompt", "run"):
        init(tmp_path, match=match, on_miss="error")
        assert SkipManager.will_replay("rollout_val", [0, 1, 2])
        assert not SkipManager.will_replay("rollout_val", [3])
    assert calls.train() == seen
    with pytest.raises(ConfigError, match="is not one of step, prompt"):
        init(tmp_path, rollout_val={"match": "run"})


def test_a_mismatch_of_validation_advises_no_other_step(tmp_path: Path) -> None:
    for step in (1, 2):
        init(tmp_path, at=step)
        Calls().validate({"ids": [step], "validate": True})
    init(tmp_path, at=1)
    with pytest.raises(MismatchError, match="as those of step 2") as caught:
        Calls().validate({"ids": [2], "validate": True})
    assert "match=run" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "differs"),
    [("temperature", False), ("val_kwargs.temperature", True), ("val_kwargs.n", True)],
)
@pytest.mark.parametrize("match", ["step", "prompt"])
def test_what_shapes_validation_is_compared(
    tmp_path: Path, key: str, differs: bool, match: str
) -> None:
    init(tmp_path)
    Calls().validate({"ids": [1]})
    host = OmegaConf.create(HOST)
    OmegaConf.update(host, f"actor_rollout_ref.rollout.{key}", 2)
    init(tmp_path, host=OmegaConf.to_container(host), match=match)
    assert SkipManager.will_replay("rollout_val", [0]) is not differs
    loop = Calls()
    refused = pytest.raises(MismatchError, match=r"(temperature|n): 2 now")
    with refused if differs else contextlib.nullcontext():
        loop.validate({"ids": [1]})
    assert loop.calls == []


class Queued:
    """A loop that submits its validation to a queue and samples it, batch by batch."""

    def __init__(self) -> None:
        self.queue, self.submitted = MemoryQueue(), 0
        annotate = functools.partial(SkipManager.annotate, role="rollout_val", queue=self.queue)
        self.submit = {
            phase: annotate(partition_id="val", phase=phase)(self._submit)
            for phase in ("submit", "refill")
        }
        self.sample = annotate(phase="sample")(self._sample)

    def _submit(self, prompts: dict[str, Any]) -> None:
        for uid in prompts["uid"]:
            self.submitted += 1
            self.queue.put([uid], "val", tags=[status_tag(0, "finished")])
            row = {"uid": uid, "x": torch.tensor([self.submitted])}
            self.queue.put([f"{uid}_0_0"], "val", [row], [row_tag(0)])

    def _sample(self, uids: list[str]) -> KVBatchMeta:
        return KVBatchMeta([f"{uid}_0_0" for uid in uids], [{}] * len(uids), "val")

    def validate(self, step: int, *batches: dict[str, Any]) -> list[int]:
        SkipManager.set_step(step)
        seen = []
        for i, batch in enumerate(batches):
            self.submit["refill" if i else "submit"]({**batch, "validate": True})
            keys = self.sample(batch["uid"]).keys
            seen += [int(row["x"]) for row in to_rows(self.queue.get(keys, "val"))]
            self.queue.delete([*keys, *batch["uid"]], "val")
        assert not self.queue.list("val")
        return seen


def test_groups_of_validation_are_replayed_into_their_partition(tmp_path: Path) -> None:
    def batches() -> tuple[dict[str, Any], ...]:
        return prompts("a", "b"), prompts("b", "c")  # a prompt twice, in two batches

    init(tmp_path, "rollout_tq", steps=[1])
    first = Queued()
    seen = [first.validate(step, *batches()) for step in (0, 1)]
    assert seen == [[1, 2, 3, 4], [5, 6, 7, 8]], "nothing is replayed in the visit that dumps it"
    init(tmp_path, "rollout_tq", steps=[1], start_engine=False)
    second = Queued()
    assert [second.validate(step, *batches()) for step in (0, 1)] == seen
    assert second.submitted == 0
    with pytest.raises(MissError, match="step 2 has no usable dump"):
        second.validate(2, *batches())
    init(tmp_path, "rollout_tq")
    with pytest.raises(MismatchError, match="serves 1 of the batch's 2 prompts"):
        Queued().validate(0, prompts("a", "new"))
