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
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.fixture
def run(python: Any, folder: Path) -> Callable[[str], Any]:
    """``run(program)``: how a program ended that has the page's files beside it."""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "HOME": str(folder), "PYTHONPATH": path}

    def run(program: str) -> Any:
        (folder / "program.py").write_text(program, encoding="utf-8")
        return python.run("program.py", cwd=folder, env=env)

    return run


def heading(program: str) -> str:
    before = TEXT.split(program)[0]
    return str(re.findall(r"^## (.*)$", before, re.MULTILINE)[-1])


@pytest.mark.parametrize("program", PROGRAMS, ids=heading)
def test_the_example_runs(run: Any, program: str) -> None:
    done = run(program)
    assert done.returncode == 0, done.stdout + done.stderr


HOST = next(program for program in PROGRAMS if "myhost" in program)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fit", "reads the config and learns the steps there"),
        ("generate", "is the stage of role rollout there"),
        ("log", "theirtrainer has no theirtrainer:Trainer.log: off is skip.log_metrics"),
    ],
)
def test_a_release_of_the_trainer_without_a_seam_is_named(
    run: Any, folder: Path, name: str, said: str
) -> None:
    trainer = folder / "theirtrainer.py"
    renamed = re.sub(rf"(def |self\.){name}\(", r"\1other(", trainer.read_text("utf-8"))
    trainer.write_text(renamed, encoding="utf-8")
    done = run(HOST)
    assert said in done.stderr
    assert done.returncode == 1


def test_a_seam_that_the_trainer_never_calls_is_named(run: Any, folder: Path) -> None:
    trainer = folder / "theirtrainer.py"
    bare = trainer.read_text("utf-8").replace("            self.generate(", "            str(")
    trainer.write_text(bare, encoding="utf-8")
    done = run(HOST)
    assert "this trainer never calls theirtrainer:Trainer.generate" in done.stderr
