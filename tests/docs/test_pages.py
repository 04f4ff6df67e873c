"""What the pages must cover: every error, every page in the navigation."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def errors() -> set[str]:
    """Every subclass of RlskipError, from the source: some modules need a host to be imported."""
    bases: dict[str, list[str]] = {}
    for file in (ROOT / "rlskip").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
    found = {"RlskipError"}
    while more := {name for name, of in bases.items() if found & set(of)} - found:
        found |= more
    public = {name for name in found if not name.startswith("_")}
    return public - {"RlskipError"} | {"RlskipAbort"}


def test_every_error_has_its_cause_and_cure() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", page, re.MULTILINE)
    named = {name for name, *_ in rows}
    assert len(errors()) > 30
    assert named == errors()


def test_every_page_is_in_the_navigation() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^(\w+)$", index, re.MULTILINE)
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"}
    assert set(listed) == pages


def test_the_reference_needs_no_other_extra_than_docs() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    modules = re.findall(r"automodule:: (\S+)", page)
    assert len(modules) > 8
    others = ("ray", "matplotlib", "tqdm", "hypothesis", "PIL")
    code = f"import sys; sys.modules.update(dict.fromkeys({others})); import {', '.join(modules)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
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
