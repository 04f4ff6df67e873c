"""Figures in the text are those of benchmarks/results.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def rows(node: Any) -> dict[str, dict[str, Any]]:
    if isinstance(node, dict) and "what" in node:
        return {node["what"]: node}
    parts = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return {name: row for part in parts for name, row in rows(part).items()}


ROWS = rows(json.loads((ROOT / "benchmarks" / "results.json").read_text(encoding="utf-8")))


def text(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_readme_states_the_measured_seconds() -> None:
    page, rollouts = text("README.md"), ROWS["rollouts"]
    first = f"{rollouts['peer']:.1f} s"
    assert f"took {ROWS['first_run_s']['ours']:.0f} s on a 2-core machine" in page
    assert f"of which rollouts took {first}" in page
    assert f"{rollouts['ours']:.1f} s instead of {first}" in page


def test_readme_states_what_a_replayed_step_takes_on_a_gpu() -> None:
    step = ROWS["grpo_step_s"]
    assert f"took {step['ours']:.1f} s instead of {step['peer']:.1f} s" in text("README.md")


@pytest.mark.parametrize(
    ("what", "unit", "scale", "digits"),
    [
        *((f"{name}_ratio", "ms", 1000, 0) for name in ("hold", "save", "load", "load_first")),
        ("bytes_ratio", "MB", 1, 1),
    ],
)
@pytest.mark.parametrize("kind", ["", "_dense"])
def test_the_table_of_the_store(what: str, unit: str, scale: int, digits: int, kind: str) -> None:
    row = ROWS[what + kind]
    ours, peer = (f"{row[side] * scale:.{digits}f} {unit}" for side in ("ours", "peer"))
    assert f"{ours} / {peer} = **1/{1 / row['ratio']:.1f}**" in text("docs/store.md")


def test_the_table_of_merge() -> None:
    for what, digits in (("packed_ratio", 0), ("list_ratio", 1)):
        row = ROWS[what]
        figures = f"{row['ours']:.{digits}f} Mtok/s | {row['peer']:.1f} Mtok/s"
        assert figures in text("docs/merge.md"), what


@pytest.mark.parametrize("what", ["sync_ratio", "sync_full_ratio", "sync_full_first"])
def test_the_table_of_the_replay_buffer(what: str) -> None:
    row = ROWS[what]
    ratio = f"1/{1 / row['ratio']:.0f}" if what == "sync_ratio" else f"{row['ratio']:.2f}"
    figures = f"(`{what}`) | {row['ours']:.{int(row['ours'] < 10)}f} ms | {row['peer']:.0f} ms"
    assert f"{figures} | {ratio} |" in text("docs/replay.md")


def test_the_seconds_of_an_update_on_merged_rows() -> None:
    row = ROWS["update_32"]
    stated = f"the merged rows take {row['ours']:.2f} s and the turns {row['peer']:.2f} s"
    assert stated in text("docs/merge.md")


def test_the_seconds_of_a_replay_without_an_engine() -> None:
    row, mib, page = ROWS["start_ratio_trl"], ROWS["memory_trl"], text("docs/hosts.md")
    assert f"takes {row['ours']:.1f} CPU seconds without an engine and {row['peer']:.1f}" in page
    assert f"{mib['ours'] / 1024:.1f} instead of {mib['peer'] / 1024:.1f} GiB" in page


def test_the_seconds_under_readmes_picture() -> None:
    replayed, without = ROWS["run_replayed"], ROWS["run_no_engine"]
    page = text("README.md")
    assert f"{replayed['peer']:.0f} CPU seconds" in page
    assert f"{replayed['ours']:.0f} when they are replayed" in page
    assert f"and {without['ours']:.0f} without the engine" in page
