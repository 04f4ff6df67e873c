"""`.ci/versions lowest` tests what pyproject.toml declares: each lower bound, to the last digit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOWEST = ROOT / ".ci" / "envs" / "lowest.txt"


@pytest.mark.skipif(not LOWEST.exists(), reason="needs the checkout")
def test_the_lowest_versions_are_the_declared_ones() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.findall(r"(?ms)^dependencies = \[(.*?)^\]", text)[0]
    declared = dict(re.findall(r'"([\w-]+)>=([\d.]+)', listed))
    pins = dict(re.findall(r"(?m)^([\w-]+)==([\d.]+)$", LOWEST.read_text(encoding="utf-8")))
    assert declared.pop("torch")  # from 2.4 on: see the file
    assert set(pins) == set(declared)
    for name, bound in declared.items():
        padded = [*bound.split("."), "0", "0"][:3]
        assert pins[name] == ".".join(padded), name
