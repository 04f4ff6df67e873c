"""Genuine vLLM on this machine's CPU, in its own environment.

The tests are skipped without these environment variables:

``RLSKIP_VLLM``
    A python with vLLM's CPU build, verl 0.9.1 and TRL (the harness's ``setup_venv.sh`` makes it).
``RLSKIP_VERL091``
    Optional: a python with verl 0.9.1 and without vLLM, in which a replay runs, too.
``RLSKIP_VLLM_HARNESS``
    The folder of ``setup_venv.sh``, ``make_assets.py`` and ``run_verl.sh``. A plug-in of vLLM's
    leaves a line in $VLLM_CPU_LOG for each engine started and for each request.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

_NAMES = ("RLSKIP_VLLM", "RLSKIP_VLLM_HARNESS")


@attrs.frozen
class Vllm:
    """The environment, and the folder for its runs and their tiny model."""

    python: Path
    harness: Path
    folder: Path
    ray: Path

    def run(self, name: str, *command: str | Path, **env: str) -> tuple[str, list[str]]:
        """Run `command` in a new folder; its output, and the lines of vLLM's log."""
        here = self.folder / name
        here.mkdir()
        log = here / "vllm.jsonl"
        paths = [env.pop("PYTHONPATH", None), os.environ.get("PYTHONPATH")]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "HOME": str(self.folder),
            "VLLM_CPU_LOG": str(log),
            "HF_HUB_OFFLINE": "1",
            **env,
        }
        done = subprocess.run(
            [*map(str, command)], cwd=here, env=env, capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        (here / "output").write_text(done.stdout + done.stderr)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        lines = log.read_text().splitlines() if log.exists() else []
        return done.stdout + done.stderr, lines


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    for name in _NAMES:
        if not Path(os.environ.get(name, "")).is_absolute():
            pytest.skip(f"{name} names no absolute path; see tests/vllm/conftest.py")
    python, harness = (Path(os.environ[name]) for name in _NAMES)
    ray = Path(tempfile.mkdtemp(prefix="rl", dir="/tmp"))  # Ray's sockets need a short path
    made = Vllm(python, harness, tmp_path_factory.mktemp("vllm"), ray)
    made.run("assets", python, harness / "make_assets.py", made.folder)
    yield made
    shutil.rmtree(ray, ignore_errors=True)
