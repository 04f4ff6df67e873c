"""Tours of README and of pages: every command runs, and prints every line that is shown."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


PAGES = ("README.md", "docs/quickstart.md", "docs/howto.md")


def tour(page: str) -> list[tuple[str, list[str]]]:
    """(command, lines shown) of the console blocks after ``<!-- tour -->``, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"<!-- tour -->\n```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    steps: list[tuple[str, list[str]]] = []
    for line in "".join(blocks).splitlines():
        if line.startswith("$ "):
            steps.append((line.removeprefix("$ "), []))
        elif line != "...":
            steps[-1][1].append(line)
    return steps


def files(page: str) -> dict[str, str]:
    """The blocks of a page that begin with ``# file: NAME``."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w+\n# file: (\S+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return dict(blocks)


def says(shown: str, line: str) -> bool:
    """Whether `line` is what the page shows, ``...`` standing for anything."""
    pattern = ".*".join(map(re.escape, shown.split("...")))
    return re.fullmatch(pattern, line.rstrip()) is not None


def test_an_ellipsis_stands_for_anything() -> None:
    assert says("...5 hits, ... saved", "[log] 5 hits, 2 s saved")
    assert not says("...5 hits", "4 hits")
    assert not says("5 hits", "15 hits")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES)
def test_the_tour_is_what_happens(page: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "train.py", tmp_path)
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    for name, text in files(page).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    scripts = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path / "home"),
        "COLUMNS": "200",
        "OMP_NUM_THREADS": "1",
    }
    commands = tour(page)
    assert len(commands) > 4
    for command, shown in commands:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment,
        )  # fmt: skip
        assert done.returncode == 0, f"$ {command}\n{done.stdout}\n{done.stderr}"
        lines = iter(done.stdout.splitlines())
        for expected in shown:
            # In order, with anything between.
            assert any(says(expected, line) for line in lines), (
                f"$ {command}\nnot said, or not there: {expected}\n{done.stdout}"
            )
