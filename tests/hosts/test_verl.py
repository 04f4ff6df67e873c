"""verl's plug-in without verl: how it is loaded, the token, a stage never called."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from rlskip.config.facts import HostFacts
from rlskip.config.settings import SkipSettings, read_skip
from rlskip.errors import NotInstalledError
from rlskip.hosts.verl.handshake import PLUGIN, attached_by, starts_verl
from rlskip.hosts.verl.seams import V0_TRAINER, seams
from rlskip.hosts.verl.trainer import begin, next_step
from tests.hosts.conftest import python_path

pytestmark = pytest.mark.usefixtures("verl_process")


@pytest.mark.parametrize(
    ("env", "way"),
    [
        ({}, "verl.plugins"),
        ({"VERL_USE_EXTERNAL_PLUGINS": "none"}, None),
        ({"VERL_USE_EXTERNAL_PLUGINS": "theirs"}, None),
        ({"VERL_USE_EXTERNAL_PLUGINS": "theirs, rlskip"}, "verl.plugins"),
        ({"VERL_USE_EXTERNAL_PLUGINS": "rlskip-fork"}, None),
    ],
)
def test_how_verl_loads_the_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], way: str | None
) -> None:
    info = tmp_path / "rlskip-9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlskip\nVersion: 9\n")
    (info / "entry_points.txt").write_text(f"[verl.plugins]\nrlskip = {PLUGIN}\n")
    for name in [name for name in os.environ if name.startswith("VERL_")]:
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(tmp_path)
    assert attached_by() == way


VERLS: dict[str, Any] = {name: {"a": 1} for name in ("actor_rollout_ref", "ray_kwargs", "trainer")}


@pytest.mark.parametrize("imported", [True, False])
def test_only_verls_applications_start_verl(
    monkeypatch: pytest.MonkeyPatch, imported: bool
) -> None:
    """An application may import verl and train by itself, or have a config like verl's."""
    if not imported:
        monkeypatch.delitem(sys.modules, "verl")
    assert starts_verl(SkipSettings(HostFacts(VERLS))) is imported
    assert not starts_verl(SkipSettings(HostFacts({"trainer": {"a": 1}})))


@pytest.mark.parametrize(
    ("main", "version", "on", "starts"),
    [
        ("mine.train", "0.8.0", ("rollout",), False),
        ("mine.train", "0.8.0", ("rollout", "ref"), True),
        ("verl.trainer.main_ppo", "0.8.0", ("rollout",), True),
        ("mine.train", "0.9.1", ("rollout",), True),
    ],
)
def test_an_old_verl_is_a_library_of_a_program_whose_stages_are_attached(
    monkeypatch: pytest.MonkeyPatch, main: str, version: str, on: tuple[str, ...], starts: bool
) -> None:
    monkeypatch.setattr(sys.modules["verl"], "__version__", version)
    spec = types.SimpleNamespace(name=main)
    monkeypatch.setitem(sys.modules, "__main__", types.SimpleNamespace(__spec__=spec))
    skip = {"attach": {"rollout": "mine:generate"}, **{role: {"enable": True} for role in on}}
    assert starts_verl(read_skip({**VERLS, "skip": skip})) is starts


def test_a_plugin_that_cannot_attach_ends_a_job_that_asks_for_rlskip(tmp_path: Path) -> None:
    # verl only logs an Exception of an entry point, and goes on without it.
    (tmp_path / "wrapt.py").write_text("raise ImportError('broken')")
    load = f"try:\n    import {PLUGIN}\nexcept Exception:\n    print('verl goes on')"
    for env, goes_on in (({}, True), ({"RLSKIP_JOB": "job"}, False)):
        kept = {k: v for k, v in os.environ.items() if k != "RLSKIP_JOB"}
        done = subprocess.run(
            [sys.executable, "-c", load], env={**kept, "PYTHONPATH": python_path(tmp_path), **env},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert "rlskip could not attach to verl: ImportError: broken" in done.stderr
        assert ("verl goes on" in done.stdout) is goes_on
        assert (done.returncode == 0) is goes_on


# -- the first step --------------------------------------------------------------------------
@pytest.mark.parametrize("steps", ["all", [2]])
def test_a_listed_step_that_never_calls_the_stage_ends_the_run(
    tmp_path: Path, steps: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams, "called", set())
    begin({"skip": {"dump_dir": str(tmp_path), "steps": steps, "rollout": {"enable": True}}})
    if steps != "all":
        next_step(1)
    next_step(2)
    with pytest.raises(NotInstalledError, match="no stage called it in step 2") as error:
        next_step(3)
    assert f"{V0_TRAINER}.init_workers" in str(error.value)


def test_the_same_config_is_installed_once(tmp_path: Path) -> None:
    """verl passes it to the manager, and again to SkipManager.init."""
    config = {"skip": {"dump_dir": str(tmp_path), "rollout": {"enable": True}}}
    begin(config)
    next_step(1)
    begin(config)
    with pytest.raises(NotInstalledError, match="no stage called it in step 1"):
        next_step(2)


def test_a_role_with_steps_of_its_own_is_not_expected_in_each_step(tmp_path: Path) -> None:
    begin({"skip": {"dump_dir": str(tmp_path), "async_rollout": {"enable": True}}})
    next_step(1)
    next_step(2)
