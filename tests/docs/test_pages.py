"""What the pages must cover: every error, every page in the navigation."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


def test_every_linked_file_exists() -> None:
    """Beside the build of the pages: that is in .ci/run alone."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
    found = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    ]
    assert len(found) > 40
    assert [(page.name, link) for page, link in found if not (page.parent / link).exists()] == []


def test_the_reference_needs_no_other_extra_than_docs(python: Any) -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    modules = re.findall(r"automodule:: (\S+)", page)
    assert len(modules) > 8
    others = ("ray", "matplotlib", "tqdm", "hypothesis", "PIL")
    code = f"import sys; sys.modules.update(dict.fromkeys({others})); import {', '.join(modules)}"
    done = python.run("-c", code)
    assert done.returncode == 0, done.stderr


def test_nothing_is_installed_from_a_package_index() -> None:
    """Of rlskip by its name alone: its extras are those of the rlskip that is installed."""
    told = re.compile(r"pip install (?:-\S+ )*rlskip(?![\w\[/.-])")
    patterns = ("*.md", "docs/*.md", "rlskip/**/*.py")
    files = {file for pattern in patterns for file in ROOT.glob(pattern)}
    found = [file for file in files if told.search(file.read_text(encoding="utf-8"))]
    assert [file.name for file in found if file.name != "CHANGELOG.md"] == []


def test_the_docs_and_readme_stay_short() -> None:
    """Without the tables that are made from the code."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    made = re.compile(r"<!-- ([\w: ]+) -->.*?<!-- /\1 -->", re.DOTALL)
    assert sum(len(made.sub("", text).split()) for text in texts) <= 20_000


def test_the_tables_are_current() -> None:
    tables = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "tables.py")))
    made = tables.made()
    pages = {page: page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")}
    old = [page.name for page, text in pages.items() if tables.current(text, made) != text]
    assert old == [], "run python docs/tables.py"
    whole = "".join(pages.values())
    for name in made:
        assert whole.count(f"<!-- {name} -->") == whole.count(f"<!-- /{name} -->") == 1


def test_troubleshooting_names_messages_that_there_are() -> None:
    """What an entry begins with in backticks; `...` in it stands for anything."""
    of_hydra = {"Could not find 'skip/", "'", "Config group override must be a string or a list"}
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    code = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "rlskip").rglob("*.py"))
    code = re.sub(r'"\s+f?"', "", code)
    named = [
        part.strip()
        for entry in re.findall(r"^- (`[^:]*?`(?:, `[^:]*?`)*)", page, re.MULTILINE)
        for message in re.findall(r"`([^`]+)`", entry)
        for part in message.split("...")
    ]
    assert len(named) > 30
    assert [part for part in named if part not in code and part not in of_hydra] == []
