"""Hydra's launchers and versions; some need a separate environment (`.ci/env`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest


@attrs.frozen
class Launcher:
    """How to choose a launcher, and the python that has it."""

    name: str
    options: tuple[str, ...]
    python: Any


@pytest.fixture
def launcher(
    request: pytest.FixtureRequest, python: Any, python_of: Callable[[str], str]
) -> Launcher:
    """The launcher that the test's parameter names; without it the test is skipped."""
    name = request.param
    options = () if name == "basic" else (f"hydra/launcher={name}",)
    if name != "ray":
        return Launcher(name, options, python)
    ray = "+hydra.launcher.ray.init"
    options = (*options, f"{ray}.num_cpus=3", f"{ray}.include_dashboard=false")
    return Launcher(name, options, python_of("ray-launcher"))


def table(said: str) -> list[list[str]]:
    """The rows of a sweep's table, without the seconds: job, role, hits, misses."""
    after = said.split("over the jobs of this sweep:\n")[1].splitlines()
    return [line.split()[:4] for line in after if line[:1].isdigit()]


@pytest.fixture(scope="session")
def hydra14(python_of: Callable[[str], str]) -> str:
    """The python of an environment with the newest pre-release of Hydra 1.4."""
    return python_of("hydra14")
