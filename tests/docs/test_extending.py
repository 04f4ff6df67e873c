"""Every example of docs/extending.md is a whole program, and runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"(?ms)^```python\n(.*?)^```", TEXT)
FILES = {match[1]: block for block in BLOCKS if (match := re.match(r"# file: (\S+)\n", block))}
PROGRAMS = [block for block in BLOCKS if block not in FILES.values()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "HOME": str(folder), "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def heading(program: str) -> str:
    before = TEXT.split(program)[0]
    return str(re.findall(r"^## (.*)$", before, re.MULTILINE)[-1])


@pytest.mark.parametrize("program", PROGRAMS, ids=heading)
def test_the_example_runs(folder: Path, program: str) -> None:
    (folder / "program.py").write_text(program, encoding="utf-8")
    run(folder, "program.py")


def test_the_queue_passes_the_suite(folder: Path) -> None:
    said = run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_counted_queue.py")
    assert re.search(r"^\d\d passed", said, re.MULTILINE), said
