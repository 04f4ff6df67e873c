"""Configs as Hydra composes them, and the config directories of real host trainers."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf


def compose_from(folder: Path, name: str, *overrides: str, **more: Any) -> DictConfig:
    """The primary config `name` of a folder, `hydra` included."""
    with initialize_config_dir(str(folder), version_base=None):
        return compose(name, list(overrides), **{"return_hydra_config": True, **more})


@pytest.fixture
def composed(tmp_path: Path) -> Callable[..., DictConfig]:
    """``composed("primary yaml", *overrides)``, as an application in another folder would.

    Keywords are other files: ``exp="a: 1"``.
    """

    def make(primary: str, *overrides: str, **others: str) -> DictConfig:
        for name, text in {"config": primary, **others}.items():
            (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
        return compose_from(tmp_path, "config", *overrides)

    return make


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., DictConfig]]:
    """``job(primary, *overrides)``: this process is in the task of that job; returns its config."""
    with initialize_config_dir(str(tmp_path), version_base=None):

        def start(primary: str, *overrides: str) -> DictConfig:
            (tmp_path / "config.yaml").write_text(primary, encoding="utf-8")
            whole = compose("config", list(overrides), return_hydra_config=True)
            HydraConfig.instance().set_config(whole)
            return OmegaConf.masked_copy(whole, [key for key in whole if key != "hydra"])

        yield start


@pytest.fixture(scope="session")
def verl_configs(wheel_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config directory of verl, from its wheel."""
    target = tmp_path_factory.mktemp("verl")
    with zipfile.ZipFile(wheel_of("verl-0.9.1")) as wheel:
        names = [n for n in wheel.namelist() if n.startswith("verl/") and "/config/" in n]
        wheel.extractall(target, names)
    return target / "verl" / "trainer" / "config"
