"""Sweeps in one process; tests/launchers tests other launchers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlskip.hooks import SkipCallback
from rlskip.jobs.records import SUMMARY
from tests.launchers.conftest import table

ON = ("-m", "+skip=rollout_cache", "skip.dump_dir=dumps")


def test_jobs_of_one_process_do_not_leak_into_each_other(app: Any) -> None:
    run = app.run(*ON, "skip.steps=[1],[1,2]", "skip.enable=true,false")
    # Job 0 dumps step 1; job 1 skips nothing; job 2 replays step 1, dumps step 2; job 3 as 1.
    assert app.generated == [1, 1, 1, 2, 2, 2, 2]
    assert table(run.out) == [["0", "rollout", "0", "1"], ["2", "rollout", "1", "1"]]
    assert app.summary("sweep/2")["rollout"]["hits"] == 1
    assert not (app.folder / "sweep" / "3" / "rlskip_summary.json").exists()


def test_a_swept_option_refuses_without_its_callback(app: Any) -> None:
    """Hydra builds callbacks from a config without the swept choice, so without ours."""
    # What Hydra advises where `skip.dump_dir=dumps` is not in struct.
    run = app.run("-m", "+skip=rollout_cache,rollout_repeat", "+skip.dump_dir=dumps", fails=True)
    assert "with it, skip.KEY=VALUE needs no `+`" in run.err
    assert (
        "add hydra/callbacks=rlskip (Hydra drops the callback of an option that is swept" in run.err
    )
    assert app.generated == []


@pytest.mark.slow
def test_an_option_that_a_swept_experiment_chooses(make_app: Callable[..., Any]) -> None:
    app = make_app()
    folder = app.folder / "conf" / "experiment"
    folder.mkdir(parents=True)
    for name in "ab":
        text = "# @package _global_\ndefaults: [/skip: rollout_cache]\nskip: {dump_dir: dumps}\n"
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    swept = ("-m", "+experiment=a,b")
    assert "-> add hydra/callbacks=rlskip (Hydra drops" in app.run(*swept, fails=True).err
    assert app.generated == []
    own = app.folder / "conf" / "hydra" / "callbacks" / "mine.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("mine: {_target_: hydra.experimental.callback.Callback}\n", encoding="utf-8")
    run = app.run(*swept, "hydra/callbacks=mine", fails=True)
    assert "-> add hydra/callbacks=[mine,rlskip] (" in run.err
    run = app.run(*swept, "hydra/callbacks=[mine,rlskip]")
    assert [row[2:] for row in table(run.out)] == [["0", "2"], ["2", "0"]]


def test_job_ten_comes_after_job_two(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    counts = {"hits": 1, "misses": 2, "seconds_saved": -0.1}
    callback = SkipCallback()
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}})
    callback.on_multirun_start(config)
    long = "3,a.long.key=1,another=2"
    for job, written in (("10", 9e9), ("2", 9e9), ("1", 0.0), (long, 9e9)):
        (tmp_path / job).mkdir()
        summary = {"job": job, "written": written, "roles": {"rollout": counts}}
        (tmp_path / job / SUMMARY).write_text(json.dumps(summary))
    with caplog.at_level("INFO"):
        callback.on_multirun_end(config)
    # Job 1 of an earlier sweep is in the same directory and is not counted.
    assert [row[0] for row in table(caplog.text)] == ["2", "10", long]
    assert "-" not in caplog.text, "loading may take longer than generating"
