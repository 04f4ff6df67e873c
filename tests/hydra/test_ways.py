"""Whichever way a config is composed, the same values win: `ways.py` has the table."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.hydra.ways import WAYS, Way, won

ROOT = Path(__file__).parents[2]


def expected(way: Way) -> dict[str, Any]:
    return {
        "rollout": [way.steps, way.dump_dir, way.action, 4],
        "typed": [64, 2, 64],
        "reward": [way.steps, 2, "cache"],
        "callback": True,
    }


@pytest.mark.parametrize("schema", [False, True], ids=["plain", "with the schema first"])
@pytest.mark.parametrize("way", WAYS)
def test_what_wins(way: str, schema: bool) -> None:
    assert won(WAYS[way], schema=schema) == expected(WAYS[way])


@pytest.mark.launchers
def test_what_wins_under_hydra_1_4(python_of: Any) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [python_of("hydra14"), "-m", "tests.hydra.ways"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    assert json.loads(done.stdout) == {way: [expected(WAYS[way])] * 2 for way in WAYS}


def test_the_page_has_every_way() -> None:
    page = (ROOT / "docs" / "howto.md").read_text(encoding="utf-8")
    table = page.partition("## Which value wins")[2].partition("\n## ")[0]
    rows = {way.partition(",")[0].replace("_self_", "`_self_`") for way in WAYS}
    assert {line.split(" | ")[0].strip("| ") for line in table.splitlines()[6:] if line} == rows
