"""How rlskip is installed: the same on each page, and never from a package index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"<!-- install -->\n```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Of rlskip by its name alone. Its extras are those of the rlskip that is installed.
FROM_AN_INDEX = re.compile(r"pip install (?:-\S+ )*rlskip(?![\w\[/.-])")


def test_readme_installs_the_sources_and_others_refer_to_it() -> None:
    (block,) = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert block.splitlines()[0].startswith("tar -xzf rlskip-"), "first, the sources"
    assert "`README.md` says how" in (ROOT / "docs/quickstart.md").read_text(encoding="utf-8")
    for page in ("cli.md", "verl.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        assert "quickstart.md#install" in text, page


@pytest.mark.parametrize("pattern", ["*.md", "docs/*.md", "rlskip/**/*.py"])
def test_nothing_is_installed_from_an_index(pattern: str) -> None:
    told = {
        str(file.relative_to(ROOT)): found
        for file in ROOT.glob(pattern)
        if file.name != "CHANGELOG.md"
        and (found := FROM_AN_INDEX.findall(file.read_text(encoding="utf-8")))
    }
    assert told == {}
