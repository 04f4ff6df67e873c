"""What starting costs: rlskip loads nothing of the command, and its help nothing of torch."""

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
    "arguments", [["--help"], ["show", "--help"], ["ls", "."], ["ls", ".", "--steps"]]
)
def test_help_and_lists_are_light(
    dumps: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(dumps)
    modules = loaded(f"from rlskip.cli.main import main; assert not main({arguments})")
    assert "rlskip.cli.main" in modules
    assert not modules & HEAVY
