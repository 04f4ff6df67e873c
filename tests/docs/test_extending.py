"""Every example of docs/extending.md is a whole program, and runs as it stands."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


@pytest.fixture
def run(python: Any, folder: Path) -> Callable[..., str]:
    env = {**os.environ, "HOME": str(folder), "PYTHONPATH": str(folder)}

    def run(*command: object) -> str:
        done = python.run(*command, cwd=folder, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return str(done.stdout)

    return run


def heading(program: str) -> str:
    before = TEXT.split(program)[0]
    return str(re.findall(r"^## (.*)$", before, re.MULTILINE)[-1])


@pytest.mark.parametrize("program", PROGRAMS, ids=heading)
def test_the_example_runs(run: Any, folder: Path, program: str) -> None:
    (folder / "program.py").write_text(program, encoding="utf-8")
    run("program.py")
