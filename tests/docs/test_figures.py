"""Figures in the text are those of benchmarks/results.json; README has no others than are held."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from benchmarks import verl_steps

ROOT = Path(__file__).parents[2]


def rows(node: Any) -> dict[str, dict[str, Any]]:
    if isinstance(node, dict) and "what" in node:
        return {node["what"]: node}
    parts = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return {name: row for part in parts for name, row in rows(part).items()}


ROWS = rows(json.loads((ROOT / "benchmarks" / "results.json").read_text(encoding="utf-8")))
# Where else a number of README is held: the test that fails when it is another one.
ELSEWHERE = {
    "90": "the page that is linked",
    "0.12": "test_train.py: the untrained policy",
    "0.71": "test_train.py: the trained policy, at least",
    "0.87": "test_train.py: the trained policy, at most",
    "0.995": "test_train.py: the best possible player",
}


def text(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_every_number_of_readme_is_held() -> None:
    cfg = OmegaConf.load(ROOT / "conf" / "config.yaml")
    metadata = text("pyproject.toml")
    (oldest,) = re.findall(r'requires-python = ">=([\d.]+)"', metadata)
    hosts, verl = text("docs/hosts.md"), text("docs/verl.md")
    trl, skyrl = (re.search(rf"Tested with {it} ([\d.]+)\.\d", hosts)[1] for it in ("TRL", "SkyRL"))  # type: ignore[index]
    main_ppo = re.search(r"\| ([\d.]+) `main_ppo`", verl)[1]  # type: ignore[index]
    generated, replayed = ROWS["run_replayed"]["peer"], ROWS["run_replayed"]["ours"]
    step = ROWS["grpo_step_s"]
    stated = [
        f"{verl_steps.STEPS} steps of verl",
        f"{generated:.0f} CPU seconds",
        f"{replayed:.0f} when they are replayed",
        f"{ROWS['run_no_engine']['ours']:.0f} without the engine",
        f"after {cfg.trainer.total_training_steps} steps",
        f"took {ROWS['first_run_s']['ours']:.0f} s on a 2-core machine",
        f"of which rollouts took {ROWS['rollouts']['peer']:.1f} s",
        f"{ROWS['rollouts']['ours']:.1f} s instead of {ROWS['rollouts']['peer']:.1f} s",
        f"took {step['ours']:.1f} s instead of {step['peer']:.1f} s",
        f"Python {oldest} or newer",
        "Python 3.11 or newer",
        f"on {oldest}.",
        f"verl {main_ppo} ",
        f"TRL {trl} ",
        f"SkyRL {skyrl}]",
    ]
    page = text("README.md")
    assert [one for one in stated if one not in page] == []
    held = {number for one in stated for number in re.findall(r"\d[\d.]*\d|\d", one)}
    prose = re.sub(r"```.*?```|\(http\S*|\bH100\b|Apache-2\.0", "", page)
    found = set(re.findall(r"(?<![\w.-])\d[\d.]*\d|(?<![\w.-])\d", prose))
    assert found - held - {*ELSEWHERE} == set()


def test_the_seconds_of_a_replay_without_an_engine() -> None:
    row, mib, page = ROWS["start_ratio_trl"], ROWS["memory_trl"], text("docs/hosts.md")
    assert f"takes {row['ours']:.1f} CPU seconds without an engine and {row['peer']:.1f}" in page
    assert f"{mib['ours'] / 1024:.1f} instead of {mib['peer'] / 1024:.1f} GiB" in page
