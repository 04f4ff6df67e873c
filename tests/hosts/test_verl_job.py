"""The launcher process: what it refuses, what it passes on, what it waits for.

tests/verl has the trainer itself. Here `verl` is an empty package with a version, so no process
ever acknowledges the job.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from rlskip.config.settings import read_skip
from rlskip.errors import NotInstalledError, RlskipError
from rlskip.hosts.verl import launcher
from rlskip.hosts.verl.names import PLUGIN

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

    def before_job(version: str, role: str = "rollout", loads: bool = True) -> None:
        for module in ("verl", PLUGIN):
            monkeypatch.setitem(sys.modules, module, None)  # so that it is as before afterwards
            del sys.modules[module]
        monkeypatch.syspath_prepend(make_verl(version, loads))
        importlib.import_module("verl")
        config = OmegaConf.create(CONFIG)
        config.skip = {"dump_dir": str(tmp_path / "dumps"), role: {"enable": True}}
        launcher.before_job(read_skip(config))

    return before_job


@pytest.mark.parametrize(
    ("version", "role", "env", "said"),
    [
        ("0.8.0", "rollout", {}, "verl 0.8.0 loads no plug-ins and would train without skipping"),
        ("0.9.1", "rollout_tq", {}, "skip.rollout_tq.enable: verl's V0 trainer never calls a st"),
        ("0.9.1", "rollout", {"VERL_USE_EXTERNAL_PLUGINS": "none"},
         "VERL_USE_EXTERNAL_PLUGINS=none: verl does not load rlskip's plug-in"),
        # In neither the entry point was loaded.
        ("0.9.1", "rollout", {}, "rlskip.hosts.verl.plugin could not be loaded by verl"),
        ("1.0", "rollout", {}, "rlskip.hosts.verl.plugin could not be loaded by verl"),
    ],
)  # fmt: skip
def test_what_would_train_unskipped_is_refused(
    launch: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
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
    newer = f"verl {version} is newer than 0.9, the newest that was tested"
    assert caplog.text.count(newer) == (version == "1.0")


@pytest.mark.parametrize("consulted", [False, True])
def test_a_job_that_nobody_acknowledged_has_failed_unless_a_stage_called_rlskip(
    launch: Callable[..., None], monkeypatch: pytest.MonkeyPatch, consulted: bool
) -> None:
    monkeypatch.setenv("RAY_RUNTIME_ENV_HOOK", "theirs.hook")
    before = dict(os.environ)
    launch("0.9.1")
    assert PLUGIN in os.environ["VERL_USE_EXTERNAL_MODULES"]
    assert os.environ["RLSKIP_NEXT_RUNTIME_ENV_HOOK"] == "theirs.hook"
    done = JobReturn(_return_value=None, status=JobStatus.COMPLETED)
    launcher.after_job(done, consulted=consulted, one_of_many=False)
    assert dict(os.environ) == before
    assert (done.status == JobStatus.COMPLETED) is consulted
    if not consulted:
        with pytest.raises(NotInstalledError, match="no process of this job acknowledged it"):
            _ = done.return_value


@pytest.mark.parametrize(
    ("ctrl_c", "ends"),
    [(signal.default_int_handler, signal.SIGINT), (signal.SIG_IGN, signal.SIGTERM)],
    ids=["usual", "behind &"],
)
def test_the_signal_that_ends_a_run(ctrl_c: Any, ends: signal.Signals) -> None:
    got: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGINT, ctrl_c)
        signal.signal(ends, lambda number, _: got.append(number))
        launcher._end_run("because")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert got == [ends]


# -- in a job of Hydra's ---------------------------------------------------------------------


@pytest.fixture
def run(make_app: Any, make_verl: Any, python_path: Any) -> Callable[..., Any]:
    """``run("task", *overrides)``: a Hydra application that imports verl 0.9.1."""

    def start(task: str, *overrides: str, **more: Any) -> Any:
        app = make_app(config=CONFIG, task=task, functions="import time\nimport verl\n")
        return app.run(*ON, *overrides, PYTHONPATH=python_path(make_verl("0.9.1")), **more)

    return start


def test_the_wait_for_an_acknowledgement_is_finite(run: Callable[..., Any]) -> None:
    done = run("time.sleep(1e6)", RLSKIP_ATTACH_TIMEOUT_S="1", fails=True)
    assert "rlskip ends this run after 1 s (RLSKIP_ATTACH_TIMEOUT_S)" in done.said
    assert "no process of this job acknowledged it" in done.said


def test_a_stage_in_the_same_process_needs_no_acknowledgement(run: Callable[..., Any]) -> None:
    run("train(cfg)")


def test_where_skip_is_off_nothing_is_checked(run: Callable[..., Any]) -> None:
    run("assert 'RAY_RUNTIME_ENV_HOOK' not in os.environ", "skip.enable=false")


RAY = (
    "import ray; {}; ray.init('local', num_cpus=1, include_dashboard=False); time.sleep({}); "
    "print('tr' + 'ained')"  # no traceback shows the word
)
# What reaches the workers of this Ray.
LOSE = (
    "[os.environ.pop(n) for n in ('RAY_RUNTIME_ENV_HOOK', 'VERL_USE_EXTERNAL_MODULES')]; "
    "os.environ['VERL_USE_EXTERNAL_PLUGINS'] = 'none'"
)


@pytest.mark.ray
def test_workers_that_lack_the_plugin_end_the_run_at_once(run: Callable[..., Any]) -> None:
    """As under `uv run`, which leaves Ray's hook out, with a Ray started elsewhere."""
    pytest.importorskip("ray")
    done = run(RAY.format(LOSE, 100), RAY_USAGE_STATS_ENABLED="0", fails=True)
    assert "rlskip ends this run: VERL_USE_EXTERNAL_MODULES: The job started Ray" in done.said
    assert "trained" not in done.said


@pytest.mark.ray
def test_workers_that_load_the_plugin_are_waited_for(run: Callable[..., Any]) -> None:
    pytest.importorskip("ray")
    # None of them trains, so that in the end none has acknowledged the job.
    done = run(RAY.format("a = 1", 12), RAY_USAGE_STATS_ENABLED="0", fails=True)
    assert "trained" in done.said
    assert "rlskip ends this run" not in done.said


# -- into Ray's workers ----------------------------------------------------------------------
# The workers of the cluster load no entry points, and it starts before anything else is set: what a
# worker has came through Ray.
REACH = """
import json, os, sys, time
import ray, verl
from omegaconf import OmegaConf
from ray.cluster_utils import Cluster
from rlskip.errors import NotInstalledError
from hydra.core.utils import JobStatus
from rlskip.config.facts import HostFacts
from rlskip.config.settings import SkipSettings
from rlskip.config.skip import RoleConfig
from rlskip.hosts.verl import handshake, launcher

config = OmegaConf.create(CONFIG)
os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "none"
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
del os.environ["VERL_USE_EXTERNAL_PLUGINS"]
seen = {}

@ray.remote
def look():
    handshake.find_job()
    names = ("RLSKIP_JOB", "RLSKIP_DIRECTORY", "VERL_USE_EXTERNAL_MODULES", "MINE", "THEIRS")
    handshake.acknowledge("rollout", "/proc/no/such/directory")
    return {name: os.environ.get(name) for name in names}

def job(name):
    os.environ["RLSKIP_JOB"] = name
    roles = {"rollout": RoleConfig(dump_dir=sys.argv[1])}
    launcher.before_job(SkipSettings(HostFacts(config), roles=roles))

class Return:
    status = JobStatus.COMPLETED

os.environ["RLSKIP_DIRECTORY"] = "/typed/here"
os.environ["VERL_USE_EXTERNAL_MODULES"] = "json"
os.environ["RAY_RUNTIME_ENV_HOOK"] = "theirs.hook"

os.environ["RLSKIP_JOB"] = "one"
job("one")
ray.init(address=cluster.address, runtime_env={"env_vars": {"MINE": "1"}})
seen["one"] = ray.get(look.remote())
launcher.after_job(Return, consulted=False, one_of_many=False)
seen["one failed"] = Return.status.name == "FAILED"

job("two")
seen["two"] = ray.get(look.remote())
launcher.after_job(Return, consulted=False, one_of_many=False)

job("three")
launcher.after_job(Return, consulted=False, one_of_many=False)
seen["three failed"] = Return.status.name == "FAILED"

class Later:
    status = JobStatus.COMPLETED

job("ray ends first")
ray.get(look.remote())
time.sleep(5)  # the launcher looks every 2 s
ray.shutdown()
launcher.after_job(Later, consulted=False, one_of_many=False)
seen["ray ended first and it failed"] = Later.status.name == "FAILED"

os.environ.pop("RAY_RUNTIME_ENV_HOOK")
ray.init(address=cluster.address)
try:
    job("four")
except NotInstalledError as error:
    seen["four"] = str(error)
print("SEEN" + json.dumps(seen))
ray.shutdown()
cluster.shutdown()
"""

THEIRS = """
def hook(runtime_env):
    env_vars = {**(runtime_env or {}).get("env_vars", {}), "THEIRS": "2"}
    return {**(runtime_env or {}), "env_vars": env_vars}
"""


@pytest.mark.ray
def test_the_plugin_and_the_jobs_name_travel_in_runtime_env(
    make_verl: Callable[[str], str], python_path: Callable[..., str], tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    site = make_verl("0.9.1")
    (Path(site) / "theirs.py").write_text(THEIRS)
    script = tmp_path / "reach.py"
    script.write_text(REACH.replace("CONFIG", repr(CONFIG)))
    env = {**os.environ, "PYTHONPATH": python_path(site), "RAY_USAGE_STATS_ENABLED": "0"}
    env.pop("RAY_RUNTIME_ENV_HOOK", None)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "dumps")],
        env=env, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(next(x[4:] for x in done.stdout.splitlines() if x.startswith("SEEN")))
    assert seen["one"] == {
        "RLSKIP_JOB": "one",
        "RLSKIP_DIRECTORY": "/typed/here",
        "VERL_USE_EXTERNAL_MODULES": "json,rlskip.hosts.verl.plugin",
        "MINE": "1",
        "THEIRS": "2",
    }
    # The acknowledgement came through Ray alone: nothing was written below dump_dir.
    assert not seen["one failed"]
    # A second job in a Ray that runs already: its name is found all the same.
    assert seen["two"]["RLSKIP_JOB"] == "two"
    assert seen["three failed"]
    assert not seen["ray ended first and it failed"], "an acknowledgement is remembered"
    assert "its workers do not load rlskip's plug-in" in seen["four"]
