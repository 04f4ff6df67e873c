"""Every test here starts and ends without a SkipManager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlskip import SkipManager
from rlskip.skip.records import JOB_VARIABLE


@pytest.fixture(autouse=True)
def _fresh_manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(JOB_VARIABLE, "job")
    SkipManager.reset()
    yield
    SkipManager.reset()


@pytest.fixture
def init(tmp_path: Path) -> Callable[..., Path]:
    """``init(role="rollout", **skip)`` switches a role on; returns its dump_dir."""

    def start(role: str = "rollout", own: dict[str, Any] | None = None, **skip: Any) -> Path:
        skip.setdefault("dump_dir", str(tmp_path / "dumps"))
        SkipManager.init({"skip": {**skip, role: {"enable": True, **(own or {})}}})
        return Path(skip["dump_dir"])

    return start
