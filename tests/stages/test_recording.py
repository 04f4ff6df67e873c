"""rlskip.record: what is kept, when, and that a training never notices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

import rlskip
from rlskip import SkipManager, stages
from rlskip.compare.records import StepRecords
from rlskip.config.nodes import read_record
from rlskip.errors import ConfigError, NotInstalledError
from rlskip.jobs.records import JOB_VARIABLE
from rlskip.runs.on_disk import dumps_of, folder_names
from rlskip.stages.parts import MOMENTS, NUMBER
from tests.clock import in_a_fork

STEP = [1]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Record from now on with these keys; returns where."""
    monkeypatch.setenv(JOB_VARIABLE, "job")
    STEP[0] = 1

    def begin(**keys: Any) -> Path:
        node = {"enable": True, "dump_dir": str(tmp_path), **keys}
        stages.start(read_record({"record": node}), lambda: STEP[0])
        return tmp_path / "stages" / "job"

    yield begin
    stages.stop()


def recorded(directory: Path, step: int = 1) -> StepRecords:
    stages.stop()
    return StepRecords(dumps_of(directory, step))


def batch(n: int = 3, prompt: int = 4, response: int = 5) -> dict[str, torch.Tensor]:
    """verl's fields: prompts padded on the left, responses on the right; row i has i + 1 tokens."""
    of_prompt = torch.ones(n, prompt)
    of_response = torch.arange(response) <= torch.arange(n)[:, None]
    of_prompt[:, 0] = 0
    return {
        "prompts": torch.arange(n * prompt).reshape(n, prompt) + 100,
        "responses": torch.where(of_response, torch.arange(response) + 10, 0),
        "attention_mask": torch.cat([of_prompt, of_response], 1).long(),
        "response_mask": of_response.long(),
    }


def test_every_kind_of_value_comes_back(start: Callable[..., Path]) -> None:
    directory = start()
    wide = torch.randn(3, 5)
    rows = batch()
    jagged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2), torch.ones(3)],
                                        layout=torch.jagged)  # fmt: skip
    rlskip.record("numbers", {"a": 1.5, "deep": {"b": True, "c": torch.tensor(2.0), "d": "text"}})
    rlskip.record("whole", np.arange(6).reshape(2, 3))
    rlskip.record("half", wide.bfloat16(), rows=rows)
    rlskip.record("gradients", wide.clone().requires_grad_(), rows=rows)
    rlskip.record("one", [0.5, 1.5, 2.5], rows=rows)
    rlskip.record("ragged", [[1.0], [1.0, 2.0], [1.0, 2.0, 3.0]], rows=rows)
    rlskip.record("jagged", jagged.bfloat16(), rows=rows)
    rlskip.record("sampled", torch.arange(6.0), rows=rows)
    found = recorded(directory)

    numbers = {name: one.load()[0] for name, (one,) in found.stages.items() if one.form == NUMBER}
    assert numbers == {
        "numbers.a": 1.5, "numbers.deep.b": True, "numbers.deep.c": 2.0, "numbers.deep.d": "text",
    }  # fmt: skip
    assert [stage[0].order for stage in found.stages.values()] == list(range(11))
    whole = found.stages["whole"][0]
    assert (whole.load().tolist(), whole.has_rows) == ([[0, 1, 2], [3, 4, 5]], False)
    assert {found.stages[name][0].dtype for name in ("half", "jagged")} == {"bfloat16"}
    parts = {
        name: [one.layout.part(one.load(), i).tolist() for i in range(3)]
        for name, (one,) in found.stages.items()
        if one.has_rows
    }
    for i, length in enumerate([1, 2, 3]):
        assert parts["gradients"][i] == wide[i, :length].tolist()
        assert parts["half"][i] == wide.bfloat16().float()[i, :length].tolist()
        assert parts["one"][i] == [i + 0.5]
        assert parts["ragged"][i] == list(range(1, length + 1))
        assert parts["jagged"][i] == [1.0] * length
    assert parts["sampled"] == [[0.0], [1.0, 2.0], [3.0, 4.0, 5.0]]
    align = {name: one.layout.align for name, (one,) in found.stages.items() if one.has_rows}
    assert align == {
        "half": "response", "gradients": "response", "one": None, "ragged": "response",
        "jagged": "response", "sampled": "sampled",
    }  # fmt: skip


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("width", [3, 1 << 19], ids=["small", "large"])
def test_values_and_rows_may_change_after_they_were_recorded(
    start: Callable[..., Path], width: int, inference: bool
) -> None:
    with torch.inference_mode(inference):
        value = torch.arange(3.0 * width).reshape(3, width)
        rows = batch(response=width)
        jagged = torch.nested.nested_tensor(list(value), layout=torch.jagged)
    before, tokens = value.clone(), rows["responses"].clone()
    directory = start()
    rlskip.record("value", value, rows=rows)
    rlskip.record("whole", value)
    rlskip.record("jagged", jagged, rows=rows)
    with torch.inference_mode(inference):
        for changed in (value, jagged.values(), *rows.values()):
            changed.zero_()
    found = recorded(directory)
    (one,), (whole,) = found.stages["value"], found.stages["whole"]
    assert np.array_equal(whole.load(), before)
    assert found.rows is not None
    for i, at in enumerate(found.rows.find(one.keys).tolist()):
        for kept in (one, *found.stages["jagged"]):
            part = kept.layout.part(kept.load(), i)
            assert np.array_equal(part[: i + 1], before[i, : i + 1])
        row = found.tokens_of(at)
        assert row is not None
        assert row[0].tolist()[3:] == tokens[i, : i + 1].tolist()
        assert row[1].tolist() == [False] * 3 + [True] * (i + 1)


def test_several_threads_record(start: Callable[..., Path]) -> None:
    directory, wide = start(), torch.randn(3, 1 << 18)

    def work(number: int) -> None:
        rows = batch(prompt=number + 2, response=1 << 18)
        for _ in range(4):
            rlskip.record(f"of {number}", wide + number, rows=rows)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    found = recorded(directory)
    assert found.rows is not None
    assert len(found.rows.keys) == 12
    for number in range(4):
        assert len(found.stages[f"of {number}"]) == 4
        for one in found.stages[f"of {number}"]:
            for i in range(3):
                mine = one.layout.part(one.load(), i)
                assert np.array_equal(mine, (wide + number)[i, : i + 1])


def test_large_values_are_written_at_once_and_small_ones_together(
    start: Callable[..., Path],
) -> None:
    directory = start()
    for i in range(50):
        rlskip.record("loss", float(i))
    rlskip.record("large", torch.zeros(1 << 19))
    rlskip.record("loss", 50.0)
    found = recorded(directory)
    assert [one.load()[0] for one in found.stages["loss"]] == [float(i) for i in range(51)]
    assert len(list(directory.glob("1*/meta.json"))) == 2


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ({"stages": "values"}, {"values"}),
        ({"stages": ["actor/*", "x"]}, {"actor/loss", "actor/kl"}),
        ({"steps": "2-3"}, set()),
    ],
)
def test_stages_and_steps_choose(
    start: Callable[..., Path], keys: dict[str, Any], kept: set[str]
) -> None:
    directory = start(**keys)
    for name in ("actor/loss", "actor/kl", "values"):
        rlskip.record(name, 1.0)
    stages.stop()
    assert set(recorded(directory).stages) == kept if kept else not directory.exists()


def test_keep_last_bounds_the_steps(start: Callable[..., Path]) -> None:
    directory = start(keep_last=2)
    for STEP[0] in range(1, 6):
        rlskip.record("loss", 1.0)
    stages.stop()
    assert {name for name in folder_names(directory) if name.isdigit()} == {"4", "5"}


def test_two_processes_of_a_job_record_one_step(start: Callable[..., Path]) -> None:
    directory = start()
    rlskip.record("loss", 1.0)
    assert start() == directory  # the second recorder numbers its parts from the start, too
    rlskip.record("loss", 2.0)
    numbers = [one.load()[0] for one in recorded(directory).stages["loss"]]
    assert sorted(numbers) == [1.0, 2.0]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_record(start: Callable[..., Path]) -> None:
    directory = start()
    rlskip.record("loss", 1.0)  # gathered, and not yet on disk
    in_a_fork(lambda: rlskip.record("loss", 2.0))
    rlskip.record("loss", 3.0)
    assert [one.load()[0] for one in recorded(directory).stages["loss"]] == [1.0, 3.0]


@pytest.mark.parametrize(
    ("value", "rows", "reason"),
    [
        (object(), None, "object cannot be recorded\n  -> give a tensor or an array"),
        (torch.eye(2).to_sparse(), None, "bad is NOT recorded"),
        (torch.zeros(2, device="meta"), None, "bad is NOT recorded"),
        (torch.tensor(1j), None, "type torch.complex64 cannot be recorded"),
        (
            torch.zeros(4),
            batch(),
            "has no part for each of 3 rows\n  -> give it one entry",
        ),
        (torch.zeros(3), {"uid": [*"abc"]}, "no field of tokens, only uid\n  -> give the batch"),
    ],
)
def test_what_cannot_be_recorded_costs_one_warning(
    start: Callable[..., Path], caplog: pytest.LogCaptureFixture, value: Any, rows: Any, reason: str
) -> None:
    directory = start()
    for _ in range(2):
        rlskip.record("bad", value, rows=rows)
    rlskip.record("good", 1.0)
    assert set(recorded(directory).stages) == {"good"}
    (warning,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert reason in warning.getMessage()


def test_a_tensor_of_several_processes_is_refused_without_a_collective(
    start: Callable[..., Path], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """FSDP2's norm of the gradients is a DTensor; a rank that asks for its value waits for all."""
    from torch.distributed.tensor import distribute_tensor

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        directory = start()
        for shape in ((), (4,)):
            rlskip.record("norm", distribute_tensor(torch.ones(shape), mesh))
        rlskip.record("good", 1.0)
    finally:
        torch.distributed.destroy_process_group()
    assert set(recorded(directory).stages) == {"good"}
    assert "value.full_tensor()" in caplog.text


def test_a_loop_without_hydra_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(JOB_VARIABLE, "job")
    node = {"enable": True, "dump_dir": str(tmp_path)}
    try:
        SkipManager.init({"record": node})
        SkipManager.set_step(2)
        rlskip.record("loss", 1.0)
        SkipManager.init({"skip": {}})  # says nothing of records
        SkipManager.set_step(3)
        rlskip.record("loss", 2.0)
        SkipManager.flush()
        assert {"2", "3"} <= set(folder_names(tmp_path / "stages" / "job"))
        SkipManager.init({"skip": {}, "record": {"enable": False}})
        assert stages.directory() is None
        with pytest.raises(ConfigError, match=r"record\.step"):
            SkipManager.init({"skip": {}, "record": {**node, "step": 1}})
        with pytest.raises(NotInstalledError):
            SkipManager.annotate(role="rollout")(lambda prompts: prompts)([1])
        # An application's own key.
        SkipManager.init(OmegaConf.create({"skip": {}, "record": {"enable": True, "fps": 30}}))
        assert stages.directory() is None
        assert "fps" in caplog.text
        SkipManager.init({"record": node})
    finally:
        SkipManager.reset()
    assert stages.directory() is None


def test_a_disk_that_cannot_be_written_costs_a_warning(
    start: Callable[..., Path], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "stages").write_text("not a directory")
    start()
    rlskip.record("loss", 1.0)
    stages.stop()
    assert "is NOT recorded" in caplog.text


def test_digests_take_little(start: Callable[..., Path]) -> None:
    rows = batch(64, 8, 512)
    value = torch.randn(64, 512)
    directory = start(values="digest")
    rlskip.record("log_probs", value, rows=rows)
    found = recorded(directory)
    (one,) = found.stages["log_probs"]
    digest = one.load()
    assert digest["moments"].shape == (64, len(MOMENTS))
    count, mean, rms, low, high, _ = digest["moments"][63].tolist()
    real = value[63, :64].double()
    assert (count, low, high) == (64, real.min().item(), real.max().item())
    assert mean == pytest.approx(real.mean().item())
    assert rms == pytest.approx(real.square().mean().sqrt().item())
    assert found.tokens_of(0) is None
    assert sum(file.stat().st_size for file in directory.rglob("*.dp")) < value.nbytes / 8


def test_the_numbers_among_metrics() -> None:
    metrics = {
        "loss": 1.5, "count": 3, "mean": np.float64(2.5), "kl": torch.tensor(0.5),
        "norm": np.array(1.0, np.float32), "note": "text", "none": None, "all": np.ones(2),
        "timing/step": 1.0, "label": np.str_("text"), "unread": torch.ones((), device="meta"),
    }  # fmt: skip
    found = stages.comparable(metrics, ["timing"])
    assert list(found) == ["loss", "count", "mean", "kl", "norm", "unread"]


def test_the_dump_dir_is_that_of_skip(tmp_path: Path) -> None:
    config = {"record": {"enable": True}, "skip": {"dump_dir": str(tmp_path)}}
    assert read_record(config).dump_dir == str(tmp_path)
    assert not read_record({"skip": {"dump_dir": "s3://bucket"}}).enable
