"""RayPool over several nodes: where its workers are, and what a killed node costs."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlskip.dispatch import RolloutDispatcher
from rlskip.keys import split_session
from rlskip.queue import MemoryQueue

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]


class Worker:
    """Notes each attempt in a directory; an attempt waits until `go` is there."""

    def __init__(self, directory: str) -> None:
        import ray

        self.directory = directory
        self.node = ray.get_runtime_context().get_node_id()

    async def __call__(self, prompt: Any, sampling: Any, session: Any) -> dict[str, Any]:
        name = f"{self.node}.{session.uid}.{session.session_id}.{session.attempt}"
        open(os.path.join(self.directory, name), "w").close()
        while not os.path.exists(os.path.join(self.directory, "go")):
            await asyncio.sleep(0.05)
        return {"responses": torch.ones(2), "node": self.node}


class Logged(MemoryQueue):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def put(self, keys: Any, *args: Any, **kwargs: Any) -> None:
        self.log += keys
        super().put(keys, *args, **kwargs)


def prompts(count: int, uid: str = "u") -> list[dict[str, Any]]:
    return [{"uid": f"{uid}_{i}", "input_ids": torch.full((3,), i)} for i in range(count)]


def begun(directory: Path) -> list[tuple[str, tuple[str, str], int]]:
    """Node, session and number of each attempt."""
    names = (path.name.rsplit(".", 3) for path in directory.iterdir() if path.name != "go")
    return [(node, (uid, session), int(attempt)) for node, uid, session, attempt in names]


def wait_for(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("room", ["for a successor", "for nobody else"])
def test_a_killed_nodes_sessions_run_elsewhere(
    make_nodes: Callable[[], Any], tmp_path: Path, room: str
) -> None:
    """One worker a node. With room for nobody else one is left, until another node joins."""
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    from rlskip.dispatch import RayPool

    nodes = make_nodes()
    sandboxes = {"sandbox": 2 if room == "for a successor" else 1}
    doomed, other = (nodes.add(name, room=sandboxes) for name in ("a", "b"))
    queue = Logged()
    config = {"dispatch": {"rollout_level": True, "n": 4, "max_concurrent_rollouts_per_worker": 2}}
    options = {"num_cpus": 0, "resources": {"sandbox": 1}}
    pool = RayPool(functools.partial(Worker, str(tmp_path)), 2, options=options)
    with RolloutDispatcher(pool, queue, config) as dispatcher:
        batch = dispatcher.submit(prompts(3), step=1)
        wait_for(lambda: len(begun(tmp_path)) == 4)
        first = begun(tmp_path)
        assert Counter(node for node, *_ in first) == {doomed.node_id: 2, other.node_id: 2}
        nodes.kill(doomed)
        (tmp_path / "go").touch()
        report = batch.result(120)
        if room == "for nobody else":
            third = nodes.add("c", room=sandboxes)
            (tmp_path / "go").unlink()
            later = dispatcher.submit(prompts(1, "later"), step=2)
            wait_for(lambda: third.node_id in {node for node, *_ in begun(tmp_path)})
            (tmp_path / "go").touch()
            assert later.result(120).failed == {}
    assert report.failed == {}
    markers = Counter(key for key in queue.log if split_session(key) and key.startswith("u_"))
    assert len(markers) == 12
    assert set(markers.values()) == {1}
    lost = {session for node, session, _ in first if node == doomed.node_id}
    again = {session for node, session, attempt in begun(tmp_path) if attempt}
    assert again == lost
    assert {node for node, _, attempt in begun(tmp_path) if attempt} == {other.node_id}
