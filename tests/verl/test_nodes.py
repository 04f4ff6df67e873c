"""verl's V0 trainer on another node than its launcher: the launcher's has no CPU to train with."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

pytestmark = [pytest.mark.verl, pytest.mark.long, pytest.mark.timeout(1200)]

# What the harness gives a Ray that verl starts, and a Ray that runs does not take.
OURS = ("num_cpus", "num_gpus", "include_dashboard", "object_store_memory", "_temp_dir")


@pytest.fixture
def two_nodes(verl091: Any) -> Iterator[tuple[str, str]]:
    """The address of a Ray with a node for the launcher and one for all else, and its home."""
    folder = tempfile.mkdtemp(prefix="rn", dir="/tmp")  # Ray's sockets need a short path
    env = {
        **os.environ,
        # Where no earlier Ray has left a token, which a head asks for from then on.
        "HOME": folder,
        "PYTHONPATH": os.pathsep.join([str(verl091.harness), os.environ.get("PYTHONPATH", "")]),
        "VERL_USE_EXTERNAL_MODULES": "verlcpu",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    memory = "--object-store-memory=300000000"
    start = [verl091.python.with_name("ray"), "start", "--node-ip-address=127.0.0.1", memory]
    head = ["--head", "--port=0", "--include-dashboard=false", f"--temp-dir={folder}"]
    try:
        _run([*start, *head, "--num-cpus=0", "--num-gpus=0"], env)
        address = Path(folder, "ray_current_cluster").read_text().strip()
        _run([*start, f"--address={address}", "--num-cpus=16", "--num-gpus=1"], env)
        yield address, folder
    finally:
        # `ray stop` would end every other Ray of this machine, too.
        for session in Path(folder).glob("session_2*"):
            mine = ["pgrep", "-f", str(session)]
            found = subprocess.run(mine, capture_output=True, text=True, check=False).stdout
            subprocess.run(["kill", "-9", *found.split()], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def _run(command: list[Any], env: dict[str, str]) -> None:
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_dumps_are_right_when_the_trainer_is_on_another_node(
    verl091: Any, two_nodes: tuple[str, str]
) -> None:
    address, home = two_nodes
    to_nodes = [f"~ray_kwargs.ray_init.{name}" for name in OURS]
    to_nodes.append(f"+ray_kwargs.ray_init.address={address}")
    on = ["+skip=rollout_cache", "skip.steps=[1]", f"skip.dump_dir={verl091.folder}/of-nodes"]

    def train(seed: int) -> tuple[Any, int]:
        """A run, and the number of sessions that its token server generated."""
        served = Path(home, f"served{seed}")
        served.mkdir()
        # The nodes were started without the harness's environment variables.
        env = {"VERLCPU_LOG_DIR": served, "VERLCPU_GEN_SEED": f"'{seed}'"}
        sent = [f"+ray_kwargs.ray_init.runtime_env.env_vars.{k}={env[k]}" for k in env]
        run = verl091.train(
            f"nodes{seed}", "v0", *on, *to_nodes, *sent, seed=seed, steps=1, HOME=home
        )
        return run, attrs.evolve(run, folder=served).generated

    (first, generated), (second, generated_again) = train(1), train(2)
    counts = [run.summary["rollout"] for run in (first, second)]
    assert [(count["hits"], count["misses"]) for count in counts] == [(0, 1), (1, 0)]
    assert (generated, generated_again) == (8, 0)
    assert first.grad_norms == second.grad_norms != []
