"""Our own store passes the public suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlskip.store import StepStore
from rlskip.testing import StoreTests


class TestStepStore(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> StepStore:
        return StepStore(tmp_path / "run")
