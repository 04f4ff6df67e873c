"""`+record=stages` under Hydra: alone, with skip, in a sweep, below `rlskip`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TASK = """
import rlskip
for step in (1, 2):
    SkipManager.set_step(step)
    rlskip.record("loss", float(step))
"""


def recorded(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.glob("dumps/stages/*/[0-9]"))


@pytest.mark.parametrize(
    ("options", "prefix"),
    [
        (["+record=stages", "+skip=rollout_cache", "skip.dump_dir=dumps"], ""),
        (["+record@rlskip=stages", "rlskip.record.dump_dir=dumps"], "record: 5\n"),
    ],
    ids=["with skip", "alone and below rlskip"],
)
def test_a_job_records(make_app: Callable[..., Any], options: list[str], prefix: str) -> None:
    app = make_app(config=f"a: 1\n{prefix}", task=TASK)
    run = app.run(*options)
    summary = json.loads((app.folder / "out" / "rlskip_summary.json").read_text())
    (job,) = (app.folder / "dumps" / "stages").iterdir()
    assert (summary["stages"], summary["job"]) == (str(job), job.name)
    assert [path.rpartition("/")[2] for path in recorded(app.folder)] == ["1", "2"]
    alone = len(options) == 2
    assert ("NOTHING is skipped" in run.said) is False
    assert ("NEVER CONSULTED" in run.said) is not alone


def test_each_job_of_a_sweep_has_its_own_records(make_app: Callable[..., Any]) -> None:
    app = make_app(task=TASK)
    app.run("-m", "+record=stages", "record.dump_dir=dumps", "a=1,2")
    assert len(list((app.folder / "dumps" / "stages").iterdir())) == 2


def test_a_typo_ends_the_job(make_app: Callable[..., Any]) -> None:
    app = make_app(task="train(cfg)")
    run = app.run("+record=stages", "record.stagez=[a]", fails=True)
    assert "did you mean record.stages?" in run.said
    assert app.generated == []
