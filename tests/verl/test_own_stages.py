"""With rlskip installed, stages under verl's own decorator are rlskip's. No trainer, no Ray."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.verl, pytest.mark.timeout(300)]


def test_a_stage_of_the_users_own_is_skipped(verl091: Any, tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("own_stages.py"))
    done = subprocess.run(
        [verl091.python, script, str(tmp_path / "dumps")],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = [json.loads(x[3:]) for x in done.stdout.splitlines() if x.startswith("RUN")]
    assert first[0] == [1, "sample_0_7"]
    assert second[0] == [], "both were replayed"
    assert second[1] == first[1] == [{"answers": ["a!", "b!"]}, {"answer": ["c!"]}]
