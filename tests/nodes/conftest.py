"""Several nodes on one machine: raylets with their own resources."""

from __future__ import annotations

import contextlib
import os
import signal
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
_CHILDREN = "task/*/children"


class Nodes:
    """A cluster whose head is this process's node."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 2, "resources": {"head": 100}, "_system_config": _QUICK}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)

    def add(self, name: str, *, room: Mapping[str, int] | None = None, **env: str) -> Any:
        """A node with the resource `name`, with `room` for more, and its own variables."""
        resources = {name: 100, **(room or {})}
        return self.cluster.add_node(num_cpus=2, resources=resources, env_vars=env)

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
