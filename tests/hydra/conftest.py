"""The config directories of real host trainers."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def verl_configs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``verl_configs("0.9.1")``: the config directory of that verl, from its wheel."""

    def unpack(version: str) -> Path:
        target = tmp_path_factory.getbasetemp() / f"verl-{version}"
        if not target.exists():
            with zipfile.ZipFile(_wheel(f"verl-{version}-py3-none-any.whl")) as wheel:
                names = [n for n in wheel.namelist() if n.startswith("verl/") and "/config/" in n]
                wheel.extractall(target, names)
        return target / "verl" / "trainer" / "config"

    return unpack


def _wheel(name: str) -> Path:
    """A wheel from PyPI, cached outside the checkout, in RLSKIP_TEST_WHEELS if that is set."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(os.environ.get("RLSKIP_TEST_WHEELS") or f"{cache}/rlskip-tests").expanduser()
    if not (folder / name).exists():
        package, version, *_ = name.split("-")
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
        done = subprocess.run(
            [*command, f"{package}=={version}"], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            pytest.skip(f"{name} could not be fetched: {done.stderr.strip()[-200:]}")
    return folder / name
