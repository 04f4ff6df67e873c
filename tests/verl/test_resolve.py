"""rlskip's wheel and verl 0.9.1 in one environment: pip finds versions that fit both."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.verl,
    pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs the checkout"),
]


def test_the_wheel_installs_next_to_verl_091(verl091: Any, tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "-o", str(tmp_path)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    report = tmp_path / "report.json"
    resolve = [verl091.python, "-m", "pip", "install", "-q", "--dry-run", "--report", report]
    done = subprocess.run(
        [*resolve, "torch==2.13.0", "verl==0.9.1", wheel], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    # rlskip changes nothing in verl's environment.
    changed = {entry["metadata"]["name"] for entry in json.loads(report.read_text())["install"]}
    assert changed <= {"rlskip"}
