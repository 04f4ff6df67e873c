"""`+record=stages` under Hydra: alone, with skip, in a sweep."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.types import RunMode
from omegaconf import open_dict

from rlskip import SkipManager, stages
from rlskip.errors import RlskipAbort
from rlskip.hooks import SkipCallback
from rlskip.jobs.records import JOB_VARIABLE, SUMMARY, begin_job, end_job

TASK = """
import rlskip
for step in (1, 2):
    SkipManager.set_step(step)
    rlskip.record("loss", float(step))
"""


def recorded(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.glob("dumps/stages/*/[0-9]"))


def test_a_job_records(make_app: Callable[..., Any]) -> None:
    app = make_app(task=TASK)
    run = app.run("+record=stages", "+skip=rollout_cache", "skip.dump_dir=dumps")
    summary = json.loads((app.folder / "out" / SUMMARY).read_text())
    (job,) = (app.folder / "dumps" / "stages").iterdir()
    assert (summary["stages"], summary["job"]) == (str(job), job.name)
    assert [path.rpartition("/")[2] for path in recorded(app.folder)] == ["1", "2"]
    assert "NEVER CONSULTED" in run.said


@pytest.mark.parametrize(
    ("config", "option", "overrides", "records"),
    [
        # Without an option, `record` may be any application's: its keys tell.
        ("a: 1", "+skip=rollout_cache", ["+record.enable=true"], True),
        ("record: {fps: 30}", "+skip=rollout_cache", ["+record.enable=true"], False),
        # An own key `skip` stays where only stages are recorded.
        *((f"skip: {own}", "+record=stages", [], True)
          for own in ("5", "fast", "[1, 2]", "{eval_batches: 5}")),
        # What is asked of skip is checked.
        ("skip: {rollout: {enabel: true}}", "+record=stages", [], None),
        ("skip: {eval_batches: 5}", "+record=stages", ["+skip.rollot.enable=true"], None),
        ("a: 1", "+record=stages", ["+skip.rollot.enable=true"], None),
    ],
)  # fmt: skip
def test_what_a_job_records_and_skips(
    composed: Any, monkeypatch: pytest.MonkeyPatch, config: str, option: str,
    overrides: list[str], records: bool | None,
) -> None:  # fmt: skip
    started: list[bool] = []
    monkeypatch.setattr(stages, "start", lambda settings, step: started.append(settings.enable))
    job = composed(f"{config}\n", option, *overrides)
    with open_dict(job.hydra):
        job.hydra.runtime.update(cwd="/", output_dir="/")
        job.hydra.mode = RunMode.MULTIRUN
    if records is None:
        with pytest.raises(RlskipAbort, match="did you mean"):
            SkipCallback().on_job_start(job)
        return
    SkipCallback().on_job_start(job)
    assert started == [records]
    assert bool(SkipManager.skip_instances) is (option == "+skip=rollout_cache")


@pytest.mark.parametrize(
    ("config", "overrides", "said"),
    [
        ("a: 1\n", ["+record=stages"], "record: stages was chosen"),
        ("a: 1\n", ["+record.enable=true"], "record.enable: true was chosen"),
        (
            "defaults: [rlskip_schema/record, _self_]\nrecord: {enable: true}\n",
            [],
            "record.enable: true was chosen",
        ),
        ("a: 1\n", ["+record=stages", "record.enable=false"], ""),
        ("record: {enable: true, fps: 30}\n", [], ""),  # the application's own
        ("record: true\n", [], ""),
        ("a: 1\n", [], ""),
    ],
)
def test_a_job_without_the_callback_is_told_once(
    job: Any, caplog: pytest.LogCaptureFixture, config: str, overrides: list[str], said: str
) -> None:
    job(config, *overrides)
    for value in (1.0, 2.0):
        stages.record("loss", value)
    assert [said in record.getMessage() for record in caplog.records] == [True] * bool(said)


@pytest.mark.parametrize(
    ("name", "ranks", "kept"),
    [("mine", "2", True), ("mine", "1", False), ("20260101-000000-0123abcd", "2", False)],
    ids=["ranks", "alone", "parent"],
)
def test_a_name_that_the_user_gave_the_ranks_stays(
    monkeypatch: pytest.MonkeyPatch, name: str, ranks: str, kept: bool
) -> None:
    """The name that rlskip made up for another process, which started this job, is that one's.

    One process needs no name: if it is exported for several runs, each is a job of its own.
    """
    monkeypatch.setenv(JOB_VARIABLE, name)
    monkeypatch.setenv("WORLD_SIZE", ranks)
    begin_job(lasts=True)
    assert (os.environ[JOB_VARIABLE] == name) is kept
    end_job()


@pytest.mark.slow
def test_rank_0_alone_writes_the_summary(make_app: Callable[..., Any]) -> None:
    app = make_app(task=TASK)
    for rank in ("1", "0"):
        named = {"RANK": rank, "WORLD_SIZE": "2", JOB_VARIABLE: "mine"}
        run = app.run("+record=stages", "record.dump_dir=dumps", **named)
        assert "NOTHING is skipped" not in run.said
        assert "NEVER CONSULTED" not in run.said
        assert (app.folder / "out" / SUMMARY).exists() is (rank == "0")
    assert [job.name for job in (app.folder / "dumps" / "stages").iterdir()] == ["mine"]
    # Each job of a sweep has a name of its own.
    named = {"WORLD_SIZE": "2", JOB_VARIABLE: "mine"}
    app.run("-m", "+record=stages", "record.dump_dir=swept", "a=1,2", **named)
    assert len(list((app.folder / "swept" / "stages").iterdir())) == 2
