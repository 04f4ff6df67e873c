"""Options and keys are documented where users look: in the tables of docs/, with their defaults."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from rlskip import DispatchConfig, MergeConfig, ReplayConfig, SkipManagerConfig
from rlskip.config.skip import BUILT_IN_ROLES

ROOT = Path(__file__).parents[1]
OPTIONS = sorted((ROOT / "rlskip_conf" / "skip").glob("*.yaml"))
NODES = {
    "skip": SkipManagerConfig,
    "dispatch": DispatchConfig,
    "merge": MergeConfig,
    "replay": ReplayConfig,
}
# | `key` | cell | cell | meaning |, where one of the cells is `default`
ROW = re.compile(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \| ", re.MULTILINE)


def in_yaml(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.mark.parametrize("node", NODES)
def test_every_key_is_documented_with_its_default(node: str) -> None:
    page = (ROOT / "docs" / f"{node}.md").read_text(encoding="utf-8")
    shown = {key: cells for key, *cells in ROW.findall(page)}
    config = NODES[node]()
    for field in dataclasses.fields(config):
        if field.name not in BUILT_IN_ROLES:
            assert f"`{in_yaml(getattr(config, field.name))}`" in shown[field.name], field.name


@pytest.mark.parametrize("option", OPTIONS, ids=lambda path: path.stem)
def test_every_option_is_documented(option: Path) -> None:
    assert f"`+skip={option.stem}`" in (ROOT / "docs" / "skip.md").read_text(encoding="utf-8")
    assert f"python train.py +skip={option.stem}" in option.read_text(encoding="utf-8")
