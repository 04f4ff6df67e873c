"""The working directory of judges."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.rescore.judged import JUDGES


@pytest.fixture
def judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module `judges`, which is the working directory."""
    (tmp_path / "judges.py").write_text(JUDGES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the working directory
    for name in ("judges", "dice"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "asked").touch()
    return tmp_path
