"""The command, run in this process; the example store of docs/cli.md."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from rlskip.cli.main import main

HERE = Path(__file__).parent
RUN = "grpo_tiny/GBS4_N2_in6_out8"


@attrs.frozen
class Said:
    """What a command said and returned."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def rlskip(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Said]:
    """``rlskip("ls", path)``: the command with these arguments."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: object) -> Said:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Said(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def _example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("example") / "dumps"
    runpy.run_path(str(HERE / "example_store.py"))["make"](root)
    return root


@pytest.fixture
def dumps(_example: Path, tmp_path: Path) -> Path:
    """A fresh copy of the example store: two runs of three steps, and two jobs' records."""
    return Path(shutil.copytree(_example, tmp_path / "dumps"))


@pytest.fixture
def run_dir(dumps: Path) -> Path:
    return dumps / RUN


@pytest.fixture(scope="session")
def verl_files() -> Path:
    """Dumps that verl's own code wrote (make.py there)."""
    return HERE / "verl_dumps"
