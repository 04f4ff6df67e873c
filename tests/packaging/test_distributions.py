"""What pip installs: the content of the wheel, and Hydra discovering each kind of installation."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rlskip import __version__

ROOT = Path(__file__).parents[2]

APP = """
import hydra
import rlskip

print(rlskip.__file__)

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    pass

main()
"""


def run(*command: str | Path, cwd: Path, **more: str) -> str:
    # Whoever runs the tests may have put the checkout on PYTHONPATH, or may release it.
    hidden = ("PYTHONPATH", "RLSKIP_HOME")
    env = {name: value for name, value in os.environ.items() if name not in hidden} | more
    command = tuple(map(str, command))
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``build("sdist")``, or ``build("wheel")``, which is built from it: the file."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "-o", out, ROOT, cwd=out)

    def find(kind: str) -> Path:
        (file,) = out.glob({"wheel": "*.whl", "sdist": "*.tar.gz"}[kind])
        return file

    return find


def test_the_wheel_holds_what_it_must(build: Callable[[str], Path]) -> None:
    with zipfile.ZipFile(build("wheel")) as wheel:
        names = set(wheel.namelist())
        info = next(name.split("/")[0] for name in names if ".dist-info/" in name)
        entry_points = wheel.read(f"{info}/entry_points.txt").decode()
        about = wheel.read(f"{info}/METADATA").decode()
    for source in ("rlskip", "rlskip_conf", "hydra_plugins"):
        kinds = (".py", ".yaml", ".html", ".js", ".css")
        files = (file for file in (ROOT / source).rglob("*") if file.suffix in kinds)
        assert {str(file.relative_to(ROOT)) for file in files} <= names
    assert "rlskip/py.typed" in names
    for text in ("LICENSE", "rlskip/report/assets/uPlot-LICENSE.txt"):
        assert f"{info}/licenses/{text}" in names
    # It is a namespace that other plug-ins live in, too.
    assert "hydra_plugins/__init__.py" not in names
    # Without it, Hydra 1.4 does not find the option files.
    assert "rlskip_conf/__init__.py" in names
    assert {name.split("/")[0] for name in names} == {
        "rlskip",
        "rlskip_conf",
        "hydra_plugins",
        info,
    }
    # Hydra 1.4 loads these.
    plugins = {"rlskip": "RlskipSearchPathPlugin", "rlskip_source": "RlskipConfigSource"}
    for name, plugin in plugins.items():
        assert f"{name} = hydra_plugins.rlskip_plugin:{plugin}" in entry_points
        assert hasattr(importlib.import_module("hydra_plugins.rlskip_plugin"), plugin)
    assert "License-Expression: Apache-2.0 AND MIT" in about


def test_the_sdist_holds_what_its_tests_and_readme_need(build: Callable[[str], Path]) -> None:
    with tarfile.open(build("sdist")) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
        prefixes = {name.partition("/")[0] for name in sdist.getnames()}
        about = next(name for name in sdist.getnames() if name.endswith("/PKG-INFO"))
        shown = sdist.extractfile(about).read().decode()  # type: ignore[union-attr]
    assert prefixes == {f"rlskip-{__version__}"}, "README unpacks it by this name"
    for name in ("pyproject.toml", "LICENSE", "README.md", "constraints.txt", "rlskip/py.typed"):
        assert name in names
    assert {"train.py", "conf/config.yaml", "tests/packaging/test_distributions.py"} <= names
    links = re.findall(r"\]\(([^)#\s]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    relative = {link for link in links if "://" not in link}
    assert relative <= names
    assert not re.search(r"\]\((?!#|https://)", shown), "they lead nowhere on an index page"
    assert "Project-URL:" not in shown, "it is built without RLSKIP_HOME"


def test_with_a_home_links_and_pictures_lead_there() -> None:
    home = "https://git.example/team/rlskip"
    shown = run(sys.executable, "-m", "hatchling", "metadata", cwd=ROOT, RLSKIP_HOME=f"{home}/")
    about = json.loads(shown)
    links = re.findall(r"\]\(([^)#\s]+)", about["readme"]["text"])
    assert f"{home}/blob/v{__version__}/docs/skip.md" in links
    assert f"{home}/raw/v{__version__}/docs/verl_steps.png" in links
    assert all(link.startswith("https://") for link in links)
    assert about["urls"]["Source"] == home
    assert all(url.startswith(home) for url in about["urls"].values())


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A fresh virtual environment that sees this one's packages, but none of its .pth files.

    So Hydra and torch need no second installation, and an editable rlskip stays invisible.
    """
    folder = tmp_path / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed))
    return folder


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_hydra_discovers_it(
    kind: str, build: Callable[[str], Path], environment: Path, tmp_path: Path
) -> None:
    what = ["-e", ROOT] if kind == "editable" else [build("wheel")]
    install = ["install", "--no-deps", "--no-build-isolation", "--ignore-installed", "--no-index"]
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, *install, *what, cwd=tmp_path)

    app = tmp_path / "elsewhere"
    app.mkdir()
    (app / "app.py").write_text(APP)
    cfg = ("+skip=rollout_cache", "skip.steps=[1,2]", "--cfg", "job")
    where, composed = run(python, "app.py", *cfg, cwd=app).split("\n", 1)
    assert "steps:\n  - 1\n  - 2\n" in composed
    home = ROOT if kind == "editable" else environment
    assert Path(where).is_relative_to(home)


LOWEST = ROOT / ".ci" / "envs" / "lowest.txt"


@pytest.mark.skipif(not LOWEST.exists(), reason="needs the checkout")
def test_the_lowest_versions_are_the_declared_ones() -> None:
    """`.ci/versions lowest` tests what pyproject.toml declares: each bound, to the last digit."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.findall(r"(?ms)^dependencies = \[(.*?)^\]", text)[0]
    declared = dict(re.findall(r'"([\w-]+)>=([\d.]+)', listed))
    pins = dict(re.findall(r"(?m)^([\w-]+)==([\d.]+)$", LOWEST.read_text(encoding="utf-8")))
    assert declared.pop("torch")  # from 2.4 on: see the file
    assert set(pins) == set(declared)
    for name, bound in declared.items():
        padded = [*bound.split("."), "0", "0"][:3]
        assert pins[name] == ".".join(padded), name
