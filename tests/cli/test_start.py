"""What starting costs: rlskip loads nothing of the command, and no command more than it needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# rlskip's own dependencies besides those of the command line. They take longer than all else.
HEAVY = {"torch", "tensordict", "ray", "numpy", "hydra", "omegaconf", "blosc2", "wrapt"}


def loaded(source: str) -> set[str]:
    program = f"{source}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_rlskip_brings_no_command_line() -> None:
    assert not loaded("import rlskip, rlskip.hooks") & {"typer", "rich", "rlskip.cli"}


@pytest.mark.parametrize(
    ("command", "may_load"),
    [
        ("--help", ""),
        ("show --help", ""),
        ("ls .", ""),
        ("ls . --steps", ""),
        ("prune . --keep-last 1", ""),
        # To read a dump, numpy is enough.
        ("verify -d .", "numpy blosc2"),
        ("show 2 -d RUN", "numpy blosc2"),
        ("diff RUN RUN", "numpy blosc2"),
        ("report RUN --html page.html", "numpy blosc2"),
        ("export 1 -d RUN --to jsonl", "numpy blosc2"),
    ],
)
def test_a_command_loads_what_it_needs(
    dumps: Path, monkeypatch: pytest.MonkeyPatch, command: str, may_load: str
) -> None:
    monkeypatch.chdir(dumps)
    arguments = command.replace("RUN", "grpo_tiny/GBS4_N2_in6_out8").split()
    modules = loaded(f"from rlskip.cli.main import main; assert not main({arguments})")
    assert "rlskip.cli.main" in modules
    assert modules & HEAVY <= set(may_load.split())
