"""Jobs that tests record and compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlskip import stages
from rlskip.compare.sides import Side
from rlskip.config.record import read_record
from rlskip.jobs.records import JOB_VARIABLE


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Side]]:
    """``job(name, body)``: records what ``body(step)`` does at two steps."""

    def make(name: str, body: Callable[[int], object], steps: Any = (1, 2), **keys: Any) -> Side:
        monkeypatch.setenv(JOB_VARIABLE, name)
        now = [0]
        node = {"enable": True, "dump_dir": str(tmp_path), **keys}
        stages.start(read_record({"record": node}), lambda: now[0])
        for now[0] in steps:
            body(now[0])
        stages.stop()
        return Side(name, tmp_path / "stages" / name)

    yield make
    stages.stop()
