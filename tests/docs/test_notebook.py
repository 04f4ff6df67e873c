"""docs/open.ipynb: its cells run in order, and each says what the notebook shows.

python tests/docs/test_notebook.py      writes the outputs again
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import runpy
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "open.ipynb"


def outputs(cells: list[dict[str, Any]], folder: Path) -> list[list[dict[str, Any]]]:
    """What a notebook would show below each cell, run on the example store in `folder`."""
    runpy.run_path(str(ROOT / "tests/cli/example_store.py"))["make"](folder / "dumps")
    names: dict[str, Any] = {}
    found = []
    for cell in cells:
        tree, said = ast.parse("".join(cell["source"])), io.StringIO()
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(said):
            exec(compile(tree, PAGE.name, "exec"), names)
            shown: list[dict[str, Any]] = []
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), PAGE.name, "eval"), names)
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
    cells = code_of(json.loads(PAGE.read_text(encoding="utf-8")))
    assert len(cells) >= 6
    for cell, found in zip(cells, outputs(cells, tmp_path), strict=True):
        assert cell["outputs"] == found, "".join(cell["source"])


if __name__ == "__main__":
    notebook = json.loads(PAGE.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as made:
        os.chdir(made)
        for one, shown in zip(
            code_of(notebook), outputs(code_of(notebook), Path(made)), strict=True
        ):
            one["outputs"] = shown
    PAGE.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
