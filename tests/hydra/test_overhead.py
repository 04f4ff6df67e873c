"""The overhead benchmark runs and reports its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.overhead", "--rounds", "2"]
    subprocess.run([*command, "--json", tmp_path / "rows.json"], cwd=ROOT, check=True, timeout=200)
    rows = {row["what"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    goals = {what: row["goal"]["value"] for what, row in rows.items() if row["goal"]}
    assert goals == {"startup_ms": 6, "off_ns": 200, "unlisted_ns": 600, "record_off_ns": 200}
    # Judged in themselves, beside verl or without it.
    assert all(rows[what]["peer"] is None for what in goals)
    assert rows["off_ns"]["ours"] < rows["unlisted_ns"]["ours"]
