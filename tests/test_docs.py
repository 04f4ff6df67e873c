"""Options and keys are documented: in the tables of docs/, and beside the keys in the code."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from rlskip import DispatchConfig, MergeConfig, RecordConfig, ReplayConfig, SkipManagerConfig
from rlskip.config.skip import AttachConfig

ROOT = Path(__file__).parents[1]
OPTIONS = sorted((ROOT / "rlskip_conf" / "skip").glob("*.yaml"))
CONFIGS = (
    SkipManagerConfig, DispatchConfig, MergeConfig, ReplayConfig, RecordConfig, AttachConfig,
)  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS)
def test_every_key_has_a_comment_on_the_page_of_keys(config: Any) -> None:
    page = (ROOT / "docs" / "keys.md").read_text(encoding="utf-8")
    table = page.partition(f"<!-- keys: {config.__name__} -->")[2].partition("<!-- /")[0]
    for field in dataclasses.fields(config):
        assert re.search(rf"^\| `{field.name}` \| .* \| `.*` \| \w.* \|$", table, re.MULTILINE)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda path: path.stem)
def test_every_option_is_documented(option: Path) -> None:
    assert f"`+skip={option.stem}`" in (ROOT / "docs" / "skip.md").read_text(encoding="utf-8")
    assert f"python train.py +skip={option.stem}" in option.read_text(encoding="utf-8")
