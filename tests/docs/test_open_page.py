"""docs/open.md: its examples are run as they are printed."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "open.md"


@pytest.mark.parametrize("extra", [False, pytest.param(True, marks=pytest.mark.data)])
def test_the_examples_do_what_they_say(
    extra: bool, dumps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(dumps.parent)
    page = PAGE.read_text(encoding="utf-8")
    if not extra:
        page = page.partition("<!-- needs: data -->")[0]
    blocks = re.findall(r"^```pycon\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) > 4
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, PAGE.name, str(PAGE), 0)
    said: list[str] = []
    doctest.DocTestRunner().run(test, out=said.append)
    if said:
        pytest.fail("".join(said))
