"""verl's plug-in apart from verl: which way it is attached, and a stage that nobody asks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlskip import SkipManager
from rlskip.errors import ConfigError, NotInstalledError
from rlskip.hosts import verl_job
from rlskip.hosts.verl import begin, next_step

PLUGIN = "rlskip.hosts.verl_plugin"


@pytest.fixture(autouse=True)
def _fresh_manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RLSKIP_JOB", "job")
    monkeypatch.setitem(sys.modules, "verl", types.SimpleNamespace(__version__="0.9.1"))
    SkipManager.reset()
    yield
    SkipManager.reset()


@pytest.mark.parametrize(
    ("version", "env", "way"),
    [
        ("0.9.1", {}, "verl.plugins"),
        ("0.9.1", {"VERL_USE_EXTERNAL_PLUGINS": "none"}, "None"),
        ("0.9.1", {"VERL_USE_EXTERNAL_PLUGINS": "theirs"}, "None"),
        ("0.9.1", {"VERL_USE_EXTERNAL_PLUGINS": "theirs, rlskip"}, "verl.plugins"),
        ("0.8.0", {}, "None"),
        ("0.8.0", {"VERL_USE_EXTERNAL_MODULES": f"json,{PLUGIN}"}, "VERL_USE_EXTERNAL_MODULES"),
    ],
)
def test_the_way_that_is_active(
    tmp_path: Path, version: str, env: dict[str, str], way: str
) -> None:
    # What pip leaves of the two packages: their metadata.
    for name, given, entry in (
        ("verl", version, ""),
        ("rlskip", "9", f"[verl.plugins]\nrlskip = {PLUGIN}\n"),
    ):
        info = tmp_path / f"{name}-{given}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {given}\n")
        (info / "entry_points.txt").write_text(entry)
    look = "import sys; from rlskip.hosts.verl import attached_by; print(attached_by())"
    kept = {k: v for k, v in os.environ.items() if not k.startswith("VERL_")}
    done = subprocess.run(
        [sys.executable, "-c", f"{look}; assert 'torch' not in sys.modules"],
        env={**kept, "PYTHONPATH": str(tmp_path), **env},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == way


def test_a_plugin_that_cannot_attach_ends_a_job_that_counts_on_it(tmp_path: Path) -> None:
    # verl keeps an Exception of an entry point to itself, and would go on without.
    (tmp_path / "wrapt.py").write_text("raise ImportError('broken')")
    load = f"try:\n    import {PLUGIN}\nexcept Exception:\n    print('verl goes on')"
    for env, goes_on in (({}, True), ({"RLSKIP_JOB": "job"}, False)):
        kept = {k: v for k, v in os.environ.items() if k != "RLSKIP_JOB"}
        done = subprocess.run(
            [sys.executable, "-c", load], env={**kept, "PYTHONPATH": str(tmp_path), **env},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert "rlskip could not attach to verl: ImportError: broken" in done.stderr
        assert ("verl goes on" in done.stdout) is goes_on
        assert (done.returncode == 0) is goes_on


# -- the first step --------------------------------------------------------------------------
@SkipManager.annotate(role="rollout")
def generate(prompts: list[int]) -> list[int]:
    return prompts


@pytest.mark.parametrize("steps", ["all", [2]])
def test_a_listed_step_that_nobody_asked_about_ends_the_run(tmp_path: Path, steps: object) -> None:
    begin({"skip": {"dump_dir": str(tmp_path), "steps": steps, "rollout": {"enable": True}}})
    assert (tmp_path / "records" / "job" / "rollout.active").exists()
    if steps != "all":
        next_step(1)
    next_step(2)
    with pytest.raises(NotInstalledError, match="step 2 went by without any stage"):
        next_step(3)


def test_a_stage_that_was_asked_goes_on(tmp_path: Path) -> None:
    begin({"skip": {"dump_dir": str(tmp_path), "rollout": {"enable": True}}})
    for step in (1, 2):
        next_step(step)
        generate([step])
    next_step(3)


# -- a dump_dir that cannot be written --------------------------------------------------------
@pytest.fixture
def unwritable(tmp_path: Path) -> dict[str, object]:
    """A config whose dump_dir holds a dump of step 1 and takes no records, whoever asks."""
    config: dict[str, object] = {"skip": {"dump_dir": str(tmp_path), "rollout": {"enable": True}}}
    SkipManager.init(config)
    SkipManager.set_step(1)
    generate([1])
    SkipManager.reset()
    shutil.rmtree(tmp_path / "records")
    (tmp_path / "records").write_text("")
    return config


def test_where_nobody_can_be_told_the_run_ends_at_once(unwritable: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="nobody can be told that rlskip acts"):
        begin(unwritable)


@pytest.mark.ray
def test_a_dump_dir_that_cannot_be_written_is_replayed_from(
    unwritable: dict[str, object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ray = pytest.importorskip("ray")
    driver = verl_job._Job({"rollout": str(tmp_path)})
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        assert not driver.acknowledged()
        begin(unwritable)
        assert f"nothing can be written in {tmp_path}" in caplog.text
        next_step(1)
        assert generate([1]) == [1]
        assert "step 1 replayed" in caplog.text
        assert driver.acknowledged(), "it is told through Ray"
    finally:
        ray.shutdown()
    assert driver.acknowledged(), "what was heard stays heard"


def test_a_role_that_tells_its_own_step_is_not_judged_by_the_loops(tmp_path: Path) -> None:
    begin({"skip": {"dump_dir": str(tmp_path), "async_rollout": {"enable": True}}})
    next_step(1)
    next_step(2)
