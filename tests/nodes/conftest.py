"""Several nodes on one machine: raylets with their own resources, one in its own mounts."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

# A dead node is noticed within seconds.
_QUICK = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}
_UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]
_CHILDREN = "task/*/children"


class Nodes:
    """A cluster whose head is this process's node."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 2, "resources": {"head": 100}, "_system_config": _QUICK}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self._started: list[subprocess.Popen[bytes]] = []

    def add(self, name: str, *, room: Mapping[str, int] | None = None, **env: str) -> Any:
        """A node with the resource `name`, with `room` for more, and its own variables."""
        resources = {name: 100, **(room or {})}
        return self.cluster.add_node(num_cpus=2, resources=resources, env_vars=env)

    def add_elsewhere(self, name: str, directory: Path, private: Path) -> None:
        """A node that finds `private` under the path of `directory`, as if on another disk."""
        start = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
            *(f"--address={self.cluster.address}", "--num-cpus=2"),
            f'--resources={{"{name}": 100}}',
        ]
        mount = 'mount --bind "$0" "$1" && shift && exec "$@"'
        self._started.append(
            subprocess.Popen(
                [*_UNSHARE, "sh", "-c", mount, str(private), str(directory), *start],
                start_new_session=True,
            )
        )
        deadline = time.monotonic() + 120
        while not any(name in node["Resources"] for node in self.alive()):
            assert time.monotonic() < deadline, "the node did not start"
            assert self._started[-1].poll() is None, "the node has ended"
            time.sleep(0.2)

    def alive(self) -> list[dict[str, Any]]:
        import ray

        return [node for node in ray.nodes() if node["Alive"]]

    def kill(self, node: Any) -> None:
        """SIGKILL the raylet and all that runs on its node."""
        (raylet,) = (info.process.pid for info in node.all_processes["raylet"])
        workers = " ".join(file.read_text() for file in Path(f"/proc/{raylet}").glob(_CHILDREN))
        for pid in (raylet, *map(int, workers.split())):
            with contextlib.suppress(ProcessLookupError):  # its workers end without a raylet
                os.kill(pid, signal.SIGKILL)
        self.cluster.remove_node(node, allow_graceful=False)

    def end(self) -> None:
        import ray

        ray.shutdown()
        for process in self._started:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)
        self.cluster.shutdown()


@pytest.fixture
def make_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Nodes]]:
    """``make_nodes()``: a cluster of one node, to which this process is connected."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray = pytest.importorskip("ray")
    made = []

    def make() -> Nodes:
        made.append(Nodes())
        ray.init(address=made[-1].cluster.address, log_to_driver=False)
        return made[-1]

    yield make
    for nodes in made:
        nodes.end()


@pytest.fixture
def can_unshare(tmp_path: Path) -> None:
    """Skip where a process cannot have its own mounts."""
    there = tmp_path / "probe"
    there.mkdir()
    tried = [*_UNSHARE, "mount", "--bind", str(there), str(there)]
    if shutil.which("unshare") is None or subprocess.run(tried, check=False).returncode:
        pytest.skip("unshare: it cannot make mounts here")
