"""What the pages must cover: every error, every page in the navigation."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def errors() -> dict[str, str]:
    """Every subclass of RlskipError and its docstring: some modules need a host to be imported."""
    bases: dict[str, list[str]] = {}
    said: dict[str, str] = {}
    for file in (ROOT / "rlskip").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
                said[node.name] = ast.get_docstring(node) or ""
    found = {"RlskipError"}
    while more := {name for name, of in bases.items() if found & set(of)} - found:
        found |= more
    return {name: said[name] for name in found if not name.startswith("_")}


def test_every_error_says_when_it_is_raised() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    found = errors()
    assert len(found) > 30
    assert all(found.values())
    assert [name for name in found if f"| `{name}` |" not in page] == []
    named = set(re.findall(r"`([A-Z]\w+(?:Error|Failure))`", page))
    assert named - {"ValueError", "OSError"} <= set(found), "an error that is gone"


def test_every_page_is_in_the_navigation() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^(\w+)$", index, re.MULTILINE)
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"}
    assert set(listed) == pages


def test_the_reference_needs_no_other_extra_than_docs(python: Any) -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    modules = re.findall(r"automodule:: (\S+)", page)
    assert len(modules) > 8
    others = ("ray", "matplotlib", "tqdm", "hypothesis", "PIL")
    code = f"import sys; sys.modules.update(dict.fromkeys({others})); import {', '.join(modules)}"
    done = python.run("-c", code)
    assert done.returncode == 0, done.stderr


def test_no_cell_of_a_table_is_blank() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    blank = [
        f"{page.name}: {line}"
        for page in pages
        for line in page.read_text(encoding="utf-8").splitlines()
        if re.match(r"\|.*\| *\|", line) or re.search(r"\| as above", line)
    ]
    assert blank == []


def test_the_docs_and_readme_stay_short() -> None:
    """Without the tables that are made from the code."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    made = re.compile(r"<!-- ([\w: ]+) -->.*?<!-- /\1 -->", re.DOTALL)
    assert sum(len(made.sub("", text).split()) for text in texts) <= 22_000


@pytest.fixture(scope="module")
def tables() -> Any:
    """`docs/tables.py`, as a module."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "tables.py")))


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_the_tables_are_current(tables: Any, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.current(text, tables.made()) == text, "run python docs/tables.py"


def test_every_table_has_its_page(tables: Any) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    for name in tables.made():
        assert pages.count(f"<!-- {name} -->") == pages.count(f"<!-- /{name} -->") == 1
