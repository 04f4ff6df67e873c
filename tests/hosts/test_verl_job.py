"""The launcher process: what it refuses, what it passes on, what it waits for.

tests/verl has the trainer itself. Here `verl` is an empty package with a version, so no process
ever acknowledges the job.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CONFIG = """
actor_rollout_ref: {rollout: {n: 2}}
ray_kwargs: {ray_init: {num_cpus: 1}}
trainer: {experiment_name: e, use_v1: false}
"""
ON = ("+skip=rollout_cache", "skip.dump_dir=dumps")


@pytest.fixture
def run(make_app: Any, make_verl: Any, python_path: Any) -> Callable[..., Any]:
    """``run("0.8.0", "task", *overrides)``: a Hydra application that imports that verl."""

    def start(version: str, task: str, *overrides: str, **more: Any) -> Any:
        app = make_app(config=CONFIG, task=task, functions="import time\nimport verl\n")
        return app.run(*(overrides or ON), PYTHONPATH=python_path(make_verl(version)), **more)

    return start


@pytest.mark.parametrize(
    ("version", "overrides", "env", "said"),
    [
        ("0.7.0", (), {}, "verl 0.7.0 is not supported"),
        ("0.8.0", ("+skip=rollout_tq_cache", "skip.dump_dir=dumps"), {},
         "skip.rollout_tq.enable: verl's V0 trainer never calls a stage"),
        ("0.9.1", (), {"VERL_USE_EXTERNAL_PLUGINS": "none"},
         "VERL_USE_EXTERNAL_PLUGINS=none: verl does not load rlskip's plug-in"),
        # This verl is of 0.9 and yet loads no plug-ins.
        ("0.9.1", (), {}, "rlskip.hosts.verl.plugin could not be loaded by verl"),
    ],
)  # fmt: skip
def test_what_would_train_unskipped_is_refused(
    run: Callable[..., Any], version: str, overrides: Any, env: dict[str, str], said: str
) -> None:
    done = run(version, "print('trained')", *overrides, fails=True, **env)
    assert said in done.said
    assert "trained" not in done.said


def test_a_newer_version_is_tried_with_one_warning(run: Callable[..., Any]) -> None:
    done = run("1.0", "print('trained')", fails=True)  # it does not load rlskip's plug-in
    assert done.said.count("verl 1.0 is newer than 0.9, the newest that was tested") == 1
    assert "is not supported" not in done.said


def test_a_job_that_nobody_acknowledged_has_failed(run: Callable[..., Any]) -> None:
    done = run("0.8.0", "print('trained')", fails=True)
    assert "trained" in done.said
    assert "no process of this job acknowledged it" in done.said


@pytest.mark.parametrize("ctrl_c", [signal.SIG_DFL, signal.SIG_IGN], ids=["usual", "behind &"])
def test_the_wait_for_an_acknowledgement_is_finite(run: Callable[..., Any], ctrl_c: Any) -> None:
    before = signal.signal(signal.SIGINT, ctrl_c)  # which what is started here inherits
    try:
        done = run("0.8.0", "time.sleep(1e6)", RLSKIP_ATTACH_TIMEOUT_S="1", fails=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "rlskip ends this run after 1 s (RLSKIP_ATTACH_TIMEOUT_S)" in done.said
    assert "no process of this job acknowledged it" in done.said


RAY = (
    "import ray; {}; ray.init('local', num_cpus=1, include_dashboard=False); time.sleep({}); "
    "print('tr' + 'ained')"  # no traceback shows the word
)
LOSE = "[os.environ.pop(n) for n in ('RAY_RUNTIME_ENV_HOOK', 'VERL_USE_EXTERNAL_MODULES')]"


@pytest.mark.ray
def test_workers_that_lack_the_plugin_end_the_run_at_once(run: Callable[..., Any]) -> None:
    """As under `uv run`, which leaves Ray's hook out, with a Ray started elsewhere."""
    pytest.importorskip("ray")
    done = run("0.8.0", RAY.format(LOSE, 100), RAY_USAGE_STATS_ENABLED="0", fails=True)
    assert "rlskip ends this run: VERL_USE_EXTERNAL_MODULES: The job started Ray" in done.said
    assert "trained" not in done.said


@pytest.mark.ray
def test_workers_that_load_the_plugin_are_waited_for(run: Callable[..., Any]) -> None:
    pytest.importorskip("ray")
    # None of them trains, so that in the end none has acknowledged the job.
    done = run("0.8.0", RAY.format("a = 1", 12), RAY_USAGE_STATS_ENABLED="0", fails=True)
    assert "trained" in done.said
    assert "rlskip ends this run" not in done.said


def test_a_stage_in_the_same_process_needs_no_acknowledgement(run: Callable[..., Any]) -> None:
    run("0.8.0", "train(cfg)")


@pytest.mark.parametrize("overrides", [("a=1",), (*ON, "skip.enable=false")])
def test_where_skip_is_off_nothing_is_checked(
    run: Callable[..., Any], overrides: tuple[str, ...]
) -> None:
    task = "import os\nassert 'RAY_RUNTIME_ENV_HOOK' not in os.environ"
    run("0.7.1", task, *("+" + o if o == "a=1" else o for o in overrides))


# -- into Ray's workers ----------------------------------------------------------------------
# The cluster starts before anything is set, so what a worker has came through Ray.
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
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
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
before = dict(os.environ)
job("one")
seen["set"] = sorted(name for name, value in os.environ.items() if before.get(name) != value)
ray.init(address=cluster.address, runtime_env={"env_vars": {"MINE": "1"}})
seen["one"] = ray.get(look.remote())
launcher.after_job(Return, consulted=False, one_of_many=False)
seen["one failed"] = Return.status.name == "FAILED"
seen["restored"] = [name for name in seen["set"] if os.environ.get(name) == before.get(name)]

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
    site = make_verl("0.8.0")
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
    assert seen["set"] == [
        "RAY_RUNTIME_ENV_HOOK",
        "RLSKIP_NEXT_RUNTIME_ENV_HOOK",
        "VERL_USE_EXTERNAL_MODULES",
    ]
    assert seen["restored"] == seen["set"]
    # A second job in a Ray that runs already: its name is found all the same.
    assert seen["two"]["RLSKIP_JOB"] == "two"
    assert seen["three failed"]
    assert not seen["ray ended first and it failed"], "an acknowledgement is remembered"
    assert "its workers do not load rlskip's plug-in" in seen["four"]
