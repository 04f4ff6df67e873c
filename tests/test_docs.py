"""Options and keys are documented where users look: in the option files and docs/skip.md."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rlskip.config import RoleConfig
from rlskip.config.skip import SkipManagerConfig

ROOT = Path(__file__).parents[1]
OPTIONS = sorted((ROOT / "rlskip_conf" / "skip").glob("*.yaml"))


def default_of(name: str) -> str:
    value = getattr(SkipManagerConfig(), name)
    return {None: "null", True: "true", False: "false"}.get(
        value if not isinstance(value, (list, dict)) else "collection", str(value)
    )


@pytest.mark.parametrize("field", [*(f.name for f in dataclasses.fields(RoleConfig)), "attach"])
def test_every_key_is_documented_with_its_default(field: str) -> None:
    default = default_of(field)
    assert f"| `{field}` | `{default}` |" in (ROOT / "docs" / "skip.md").read_text()
    for option in OPTIONS:
        assert f"#   {field}: {default} " in option.read_text(), option.name


@pytest.mark.parametrize("option", OPTIONS, ids=lambda path: path.stem)
def test_every_option_is_documented(option: Path) -> None:
    assert f"`+skip={option.stem}`" in (ROOT / "docs" / "skip.md").read_text()
    assert f"python train.py +skip={option.stem}" in option.read_text()
