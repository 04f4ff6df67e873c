"""verl's processes: how the plug-in is loaded, the launcher, the first steps.

tests/verl has the trainer itself. Here `verl` is an empty package with a version, or a name.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from rlskip.config.facts import HostFacts
from rlskip.config.settings import SkipSettings, read_skip
from rlskip.errors import ConfigError, NotInstalledError, RlskipError
from rlskip.hosts.verl import handshake
from rlskip.hosts.verl.handshake import PLUGIN, TOKEN_VARIABLE, attached_by, starts_verl
from rlskip.hosts.verl.seams import V0_TRAINER, seams
from rlskip.hosts.verl.trainer import begin, next_step
from tests.hosts.conftest import python_path

pytestmark = pytest.mark.usefixtures("verl_process")

CONFIG = """
actor_rollout_ref: {rollout: {n: 2}}
ray_kwargs: {ray_init: {num_cpus: 1}}
trainer: {experiment_name: e, use_v1: false}
"""
ON = ("+skip=rollout_cache", "skip.dump_dir=dumps")


# -- in this process -------------------------------------------------------------------------


@pytest.fixture
def launch(
    make_verl: Any, job: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """``launch("0.9.1", role)``: what the callback does at the start of a job of that verl."""

    def before_job(version: str, role: str = "rollout", loads: bool = True, **more: Any) -> None:
        for module in ("verl", PLUGIN):
            monkeypatch.setitem(sys.modules, module, None)  # so that it is as before afterwards
            del sys.modules[module]
        monkeypatch.syspath_prepend(make_verl(version, loads))
        importlib.import_module("verl")
        skip = {"dump_dir": str(tmp_path / "dumps"), role: {"enable": True}}
        config = OmegaConf.merge(OmegaConf.create(CONFIG), {"skip": skip, **more})
        before = config.copy()
        handshake.before_job(read_skip(config))
        assert config == before, "the process that trains changes its own"

    return before_job


@pytest.mark.parametrize(
    ("version", "role", "env", "said"),
    [
        ("0.8.0", "rollout", {}, "verl 0.8.0 loads no plug-ins and would train without skipping"),
        ("0.9.1", "rollout_tq", {}, "skip.rollout_tq.enable: verl's V0 trainer never calls a st"),
        ("0.9.1", "rollout", {"VERL_USE_EXTERNAL_PLUGINS": "none"},
         "VERL_USE_EXTERNAL_PLUGINS=none: verl has not loaded rlskip's plug-in"),
        ("1.0", "rollout", {}, 'python -c "import verl, rlskip.hosts.verl.plugin"'),
    ],
)  # fmt: skip
def test_what_would_train_unskipped_is_refused(
    launch: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    role: str,
    env: dict[str, str],
    said: str,
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RlskipError) as error:
        launch(version, role, loads=role == "rollout_tq")
    assert said in str(error.value)


def test_a_job_leaves_the_environment_as_it_was(launch: Callable[..., None]) -> None:
    before = dict(os.environ)
    launch("0.9.1", "rollout_tq", trainer={"use_v1": True}, replay={})
    assert os.environ[TOKEN_VARIABLE] == "1"
    done = JobReturn(_return_value=None, status=JobStatus.COMPLETED)
    handshake.after_job(done, one_of_many=False)
    assert dict(os.environ) == before
    assert done.status == JobStatus.COMPLETED


@pytest.mark.parametrize("lacks_plugin", [True, False])
def test_a_run_that_verls_own_skip_manager_ends_names_the_plugin(
    launch: Callable[..., None], lacks_plugin: bool
) -> None:
    """What verl says where the process that trains has no plug-in (tests/verl/test_v0.py)."""
    launch("0.9.1")
    theirs = "ConfigKeyError: Key 'provider' not in 'SkipManagerConfig'"
    said = ValueError(theirs if lacks_plugin else "out of memory")
    done = JobReturn(_return_value=said, status=JobStatus.FAILED)
    handshake.after_job(done, one_of_many=False)
    with pytest.raises((NotInstalledError, ValueError)) as error:
        _ = done.return_value
    assert (error.value is said) is not lacks_plugin
    if lacks_plugin:
        assert "did not load rlskip's plug-in" in str(error.value)
        assert error.value.__cause__ is said


def test_a_trainer_whose_dump_dir_is_another_one_ends_before_it_trains(
    launch: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "SHOWN_S", 0.1)
    launch("0.9.1")
    on = {"rollout": {"enable": True}}
    begin({"skip": {"dump_dir": str(tmp_path / "dumps"), **on}})
    another = {"skip": {"dump_dir": str(tmp_path / "another"), **on}}
    with pytest.raises(ConfigError, match=r"skip\.rollout\.dump_dir: it is not shared"):
        begin(another)
    handshake.after_job(JobReturn(None, status=JobStatus.COMPLETED), False)
    begin(another)  # of no launcher's


def test_no_token_is_looked_for_where_one_cannot_be_written(
    launch: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    on = {"rollout": {"enable": True, "dump_dir": str(tmp_path)}}
    launch("0.9.1", skip={**on, "own": {"enable": True, "dump_dir": str(tmp_path / "file")}})
    assert TOKEN_VARIABLE not in os.environ
    handshake.after_job(JobReturn(None, status=JobStatus.COMPLETED), False)


# -- in a job of Hydra's ---------------------------------------------------------------------


def test_where_skip_is_off_nothing_is_checked(make_app: Any, make_verl: Any) -> None:
    task = "assert 'RLSKIP_TOKEN' not in os.environ"
    app = make_app(config=CONFIG, task=task, functions="import verl\n")
    app.run(*ON, "skip.enable=false", PYTHONPATH=python_path(make_verl("0.9.1")))


# -- into Ray's workers: tests/verl shows that they arrive ------------------------------------


def test_the_jobs_name_reaches_the_process_that_trains(
    launch: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a job of many, each of which starts Ray again."""
    monkeypatch.setenv("RLSKIP_DIRECTORY", "/typed/here")
    given: list[Any] = []
    ray: Any = types.ModuleType("ray")
    ray.init, ray.shutdown = (lambda **how: given.append(how)), given.clear
    ray.is_initialized = lambda: bool(given)
    monkeypatch.setitem(sys.modules, "ray", ray)
    launch("0.9.1")
    ray.init(address="auto", runtime_env={"env_vars": {"MINE": "1"}})
    names = {"RLSKIP_JOB": "job", "RLSKIP_DIRECTORY": "/typed/here", TOKEN_VARIABLE: "1"}
    assert given == [{"address": "auto", "runtime_env": {"env_vars": {"MINE": "1", **names}}}]
    with pytest.raises(ConfigError, match=r"call ray\.shutdown\(\) first"):
        handshake.before_job(
            read_skip({**OmegaConf.create(CONFIG), "skip": {"rollout": {"enable": True}}})
        )
    handshake.after_job(JobReturn(None, status=JobStatus.COMPLETED), one_of_many=True)
    assert given == [], "Ray is left"
    ray.init(address="auto")
    assert given == [{"address": "auto"}]


# -- the plug-in ---------------------------------------------------------------------------------


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
