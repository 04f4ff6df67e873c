"""docs/compare.md: its golden run is recorded, kept and compared as it is printed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_golden_run_fails_by_stage(
    tmp_path: Path, python: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its programs run in a Python that has imported torch, and its test in this one."""
    page = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
    section = page.partition("## In CI: a golden run")[2]
    shell = re.search(r"((?:^    .*\n)+)", section, re.MULTILINE)
    test = re.search(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert shell is not None
    assert test is not None
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    source = (ROOT / "train.py").read_text(encoding="utf-8")
    (tmp_path / "train.py").write_text(source)
    monkeypatch.chdir(tmp_path)

    def run(command: list[str], check: bool) -> None:
        done = python.run(*command[1:])
        assert done.returncode == 0, done.stdout + done.stderr

    record, add = shell[1].replace("\\\n", "").splitlines()
    assert add.split() == ["git", "add", "golden"]
    run(shlex.split(record), check=True)
    recorded = [file for file in tmp_path.glob("golden/**/*") if file.is_file()]
    assert sum(file.stat().st_size for file in recorded) < 1_000_000, "small enough to commit"
    names: dict[str, Any] = {}
    exec(compile(test[1], "test_golden.py", "exec"), names)
    names["subprocess"] = SimpleNamespace(run=run)
    (tmp_path / "same").mkdir()
    names["test_training_is_what_it_was"](tmp_path / "same")
    planted = source.replace("earned.std(1, keepdim=True)", "earned.std(0, keepdim=True)")
    assert planted != source
    (tmp_path / "train.py").write_text(planted)
    (tmp_path / "other").mkdir()
    with pytest.raises(AssertionError, match="advantages differs first, at step 1"):
        names["test_training_is_what_it_was"](tmp_path / "other")
