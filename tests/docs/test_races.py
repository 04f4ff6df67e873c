"""The list of races in docs/design.md names comments and tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_RACE = re.compile(r"- .+: `(\w+)\.(\w+)\.(\w+)`, `([\w/]+\.py)(?:::(\w+))?`")


def _races() -> list[str]:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = text.split("\n## Races\n")[1].split("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("- ")]


@pytest.mark.parametrize("line", _races())
def test_a_race_has_a_comment_and_a_test(line: str) -> None:
    found = _RACE.fullmatch(line)
    assert found, line
    room, module, name, test_file, test = found.groups()
    code = (ROOT / "rlskip" / room / f"{module}.py").read_text(encoding="utf-8")
    after = re.split(rf"(?:def|class) {name}\b", code)
    assert len(after) > 1, f"{module}.py has no {name}"
    body = re.split(r"\n(?: {0,4})(?:async def|def|class|@)", after[1])[0]
    assert '"""' in body or "# " in body, f"{name} does not tell it"
    tests = (ROOT / "tests" / test_file).read_text(encoding="utf-8")
    assert test is None or f"def {test}(" in tests


def test_the_main_paths_are_of_functions_that_there_are() -> None:
    """The first column of the listings: `module.name`, `Class.name`, or a name alone."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    listings = re.findall(r"^## A [a-z ]+\n\n```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    heads = [re.split(r"\s{2,}", line.strip())[0] for one in listings for line in one.splitlines()]
    names = {name.rpartition(".")[2] for head in heads for name in head.split(", ")} - {"the stage"}
    code = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "rlskip").rglob("*.py"))
    assert len(names) > 20
    assert [one for one in names if not re.search(rf"(?:def|class) {one}\b", code)] == []
