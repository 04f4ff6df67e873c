"""docs/compare.md: its golden run is recorded, kept and compared as it is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
def test_a_golden_run_fails_by_stage(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
    section = page.partition("## In CI: a golden run")[2]
    shell = re.search(r"((?:^    .*\n)+)", section, re.MULTILINE)
    test = re.search(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert shell is not None
    assert test is not None
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    source = (ROOT / "train.py").read_text(encoding="utf-8")
    (tmp_path / "train.py").write_text(source)
    (tmp_path / "test_golden.py").write_text(test[1])
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
           "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}  # fmt: skip

    def run(command: str) -> tuple[int, str]:
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400
        )
        return done.returncode, done.stdout + done.stderr

    code, said = run(f"git init -q . && {shell[1]}")
    assert code == 0, said
    recorded = [file for file in tmp_path.glob("golden/**/*") if file.is_file()]
    assert sum(file.stat().st_size for file in recorded) < 1_000_000, "small enough to commit"
    code, said = run("python -m pytest -q -p no:cacheprovider test_golden.py")
    assert code == 0, said
    planted = source.replace("earned.std(1, keepdim=True)", "earned.std(0, keepdim=True)")
    assert planted != source
    (tmp_path / "train.py").write_text(planted)
    code, said = run("python -m pytest -q -p no:cacheprovider test_golden.py")
    assert code == 1
    assert "advantages differs first, at step 1" in said
