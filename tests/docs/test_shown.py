"""docs/cli.md and docs/open.ipynb: what they show is run again, and says what is shown there.

python tests/docs/test_shown.py      writes the outputs again
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import runpy
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "cli.md"
NOTEBOOK = ROOT / "docs" / "open.ipynb"
COLUMNS = "100"
BLOCK = re.compile(r"```console\n(.*?)```\n", re.DOTALL)
PROGRAM = re.compile(r"```python\n# file: (\S+)\n(.*?)```\n", re.DOTALL)
# What another machine, day or release says otherwise.
VARIES = [
    (r"(?<![\w/])/[^\s,]*[\w/]", "PATH"),
    (r"\b\d+(\.\d+)?\s(bytes|[kMGT]?B)\b", "SIZE"),
    (r"\b\d+(\.\d+)? (s|min|h|d)\b", "AGE"),
    (r"\b\d+\.\d+(\.\w+)+\b", "VERSION"),
    (r"20\d\d-\d\d-\d\dT[\d:+]+", "TIME"),
    (r"─+", "-"),
    (r"\s+", " "),
]


def make_store(folder: Path) -> None:
    runpy.run_path(str(ROOT / "tests/cli/example_store.py"))["make"](folder / "dumps")


def prepare(folder: Path) -> None:
    make_store(folder)
    for name in ("train.py", "conf"):
        (folder / name).symlink_to(ROOT / name)
    for name, program in PROGRAM.findall(PAGE.read_text()):
        (folder / name).write_text(program)
    os.environ["HOME"] = str(folder)


def commands(block: str) -> Iterator[tuple[str, str]]:
    """Each command of a block, and what is shown below it."""
    for piece in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, shown = piece.partition("\n")
        yield command, shown


def run(command: str) -> str:
    """What a command says, on either stream."""
    from rlskip.cli.main import main

    name, *arguments = shlex.split(command)
    assert name == "rlskip"
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        main(arguments)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    # What torch logs is no part of the answer.
    return "".join(f"{line}\n" for line in lines if not re.match(r"[WI]\d{4} ", line))


def steady(said: str) -> str:
    for pattern, word in VARIES:
        said = re.sub(pattern, word, said)
    return said.strip()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Short, because a long path would be cut to fit into its column."""
    with tempfile.TemporaryDirectory(prefix="r") as folder:
        yield Path(folder).resolve()


@pytest.mark.timeout(240)
def test_every_shown_command_says_what_is_shown(
    short_path: Path, python: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "")  # undone at the end, whatever it is set to
    prepare(short_path)
    monkeypatch.chdir(short_path)
    monkeypatch.setenv("COLUMNS", COLUMNS)
    # What doctor asks for its config is a program of Python's.
    doctor = "rlskip.doctor.command.run_command"
    monkeypatch.setattr(doctor, lambda command: python.run(*command[1:]))
    shown = [pair for block in BLOCK.findall(PAGE.read_text()) for pair in commands(block)]
    assert len(shown) > 8
    for command, expected in shown:
        assert steady(run(command)) == steady(expected), command


def test_every_command_is_documented() -> None:
    from rlskip.cli.main import app

    names = {command.callback.__name__ for command in app.registered_commands if command.callback}
    headings = set(re.findall(r"^## (\w+)$", PAGE.read_text(), re.MULTILINE))
    assert headings == names


# -- the notebook ------------------------------------------------------------------------------


def outputs(cells: list[dict[str, Any]], folder: Path) -> list[list[dict[str, Any]]]:
    """What a notebook would show below each cell, run on the example store in `folder`."""
    make_store(folder)
    names: dict[str, Any] = {}
    found = []
    for cell in cells:
        tree, said = ast.parse("".join(cell["source"])), io.StringIO()
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(said):
            exec(compile(tree, NOTEBOOK.name, "exec"), names)
            shown: list[dict[str, Any]] = []
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names)
                data = {"text/plain": repr(value).splitlines(keepends=True)}
                shown = [{"data": data, "execution_count": None, "metadata": {},
                          "output_type": "execute_result"}]  # fmt: skip
        text = said.getvalue().splitlines(keepends=True)
        stream = {"name": "stdout", "output_type": "stream", "text": text}
        found.append([*([stream] if text else []), *shown])
    return found


def code_of(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_shows_what_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = code_of(json.loads(NOTEBOOK.read_text(encoding="utf-8")))
    assert len(cells) >= 6
    for cell, found in zip(cells, outputs(cells, tmp_path), strict=True):
        assert cell["outputs"] == found, "".join(cell["source"])


# -- written again -----------------------------------------------------------------------------


def write_page() -> None:
    """Put what the commands say today below them, with neutral paths."""
    os.environ["COLUMNS"] = COLUMNS
    page = PAGE.read_text()
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        os.chdir(folder)
        neutral = [
            (folder, "/home/me"),
            (str(ROOT), "/home/me/rlskip"),
            (sys.prefix, "/home/me/venv"),
        ]

        def fill(match: re.Match[str]) -> str:
            said = "".join(f"$ {c}\n{run(c)}" for c, _ in commands(match[1]))
            for real, word in neutral:
                said = said.replace(real, word)
            return f"```console\n{said}```\n"

        PAGE.write_text(BLOCK.sub(fill, page))


def write_notebook() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as made:
        os.chdir(made)
        cells = code_of(notebook)
        for one, shown in zip(cells, outputs(cells, Path(made)), strict=True):
            one["outputs"] = shown
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_notebook()
    write_page()
