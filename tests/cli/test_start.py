"""What starting costs: rlskip loads nothing of the command, and no command more than it needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# rlskip's own dependencies besides those of the command line. They take longer than all else.
HEAVY = {"torch", "tensordict", "ray", "numpy", "hydra", "omegaconf", "blosc2", "wrapt"}


def loaded(*sources: str) -> list[set[str]]:
    """What a new Python has loaded after each of these."""
    shown = "import json, sys; print('LOADED' + json.dumps(sorted(sys.modules)))"
    program = "\n".join(f"{source}\n{shown}" for source in sources)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("LOADED")]
    return [set(json.loads(line.removeprefix("LOADED"))) for line in lines]


def test_importing_rlskip_brings_no_command_line() -> None:
    (modules,) = loaded("import rlskip, rlskip.hooks")
    assert not modules & {"typer", "rich", "rlskip.cli"}


# Each may load what the ones before it have loaded.
COMMANDS = {
    "": ["--help", "show --help", "ls .", "ls . --steps", "prune . --keep-last 1"],
    # To read a dump, numpy is enough.
    "numpy blosc2": [
        "verify -d .",
        "show 2 -d RUN",
        "compare RUN RUN",
        "report RUN --html page.html",
        "export 1 -d RUN --to jsonl",
    ],
    # To compose a config Hydra is needed, and to make its roles, which run no stage, no torch.
    "numpy blosc2 hydra omegaconf wrapt": [
        "--version",
        "doctor",
        "doctor python APP +skip=rollout_cache +record=stages skip.n=1",
    ],
}
APP = """
import hydra
from rlskip import SkipManager

@SkipManager.annotate(role="rollout")
def generate(prompts):
    return prompts

@hydra.main(version_base=None, config_path=None)
def main(config):
    pass

if __name__ == "__main__":
    main()
"""


def test_a_command_loads_what_it_needs(
    dumps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (app := tmp_path / "app.py").write_text(APP)
    monkeypatch.chdir(dumps)
    run = "from rlskip.cli.main import main; assert not main({})"
    places = {"RUN": "grpo_tiny/GBS4_N2_in6_out8", "APP": str(app)}
    typed = [(line, may.split()) for may, lines in COMMANDS.items() for line in lines]
    words = [[places.get(word, word) for word in line.split()] for line, _ in typed]
    for (line, may), modules in zip(typed, loaded(*map(run.format, words)), strict=True):
        assert "rlskip.cli.main" in modules
        assert modules & HEAVY <= {*may}, line
