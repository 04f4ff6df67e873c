"""A step is killed, or a part of what runs it: what is missing is generated, on another node."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlskip.dispatch import LocalPool, RolloutDispatcher
from rlskip.dispatch.journal import JournalWriter, frames
from rlskip.dispatch.sink import Journals
from rlskip.keys import split_session, split_trajectory
from rlskip.queue import MemoryQueue
from rlskip.store import Identity, StepStore
from tests.clock import eventually

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]

PROMPTS, N, STEP = 3, 4, 5
EARLY = 2  # sessions of a prompt that do not wait for `go`
CONFIG = {"dispatch": {"rollout_level": True, "n": N, "journal": True, "session_timeout_s": 300}}


def rows(session: Any) -> dict[str, Any]:
    return {"responses": torch.tensor([session.seed % 1000, session.session_id])}


# A dead node is noticed within seconds.
QUICK = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Raylets on this machine, each a node with its own resources; this process is at the head."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "resources": {"head": 100}, "_system_config": QUICK}
    made = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def kill(cluster: Any, node: Any) -> None:
    """SIGKILL the raylet and all that runs on its node."""
    (raylet,) = (info.process.pid for info in node.all_processes["raylet"])
    children = Path(f"/proc/{raylet}").glob("task/*/children")
    workers = " ".join(file.read_text() for file in children)
    for pid in (raylet, *map(int, workers.split())):
        with contextlib.suppress(ProcessLookupError):  # its workers end without a raylet
            os.kill(pid, signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)


class Worker:
    """Notes each attempt in a directory; late sessions wait until `go` is there.

    With a `journal` it journals its sessions itself, and no row leaves it.
    """

    def __init__(self, directory: str, journal: JournalWriter | None = None) -> None:
        self.directory = directory
        self.journal = journal

    async def __call__(self, prompt: Any, sampling: Any, session: Any) -> Any:
        name = f"{session.uid}.{session.session_id}.{session.attempt}.{os.getpid()}"
        open(os.path.join(self.directory, name), "w").close()
        while session.session_id >= EARLY and not os.path.exists(f"{self.directory}/go"):
            await asyncio.sleep(0.05)
        made = rows(session)
        if self.journal is None:
            return made
        return await self.journal.add(session, [made], [{}])


class Logged(MemoryQueue):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def put(self, keys: Any, *args: Any, **kwargs: Any) -> None:
        self.log += keys
        super().put(keys, *args, **kwargs)

    def by_key(self) -> dict[str, list[int]]:
        keys = sorted(filter(split_trajectory, self.list("train")))
        return {key: self.get([key], "train")["responses"][0].tolist() for key in keys}


def prompts() -> list[dict[str, Any]]:
    return [{"uid": f"u_{i}", "input_ids": torch.full((3,), i)} for i in range(PROMPTS)]


def drive(dumps: str, attempts: str, who_journals: str) -> dict[str, Any]:
    """Dispatch a step from a node of its own: its report, markers and rows."""
    from rlskip.dispatch import RayPool

    Path(attempts, f"driver.{os.getpid()}").touch()
    queue = Logged()
    journals = Journals(StepStore(dumps), Identity(), queue)
    journal = journals.writer if who_journals == "the workers" else None
    # One worker a node.
    options = {"num_cpus": 0, "resources": {"worker": 1}}
    pool = RayPool(functools.partial(Worker, attempts, journal), 2, options=options)
    with RolloutDispatcher(pool, queue, CONFIG, journals=journals) as dispatcher:
        report = dispatcher.submit(prompts(), step=STEP).result(200)
    markers = Counter(filter(split_session, queue.log))
    return {
        "resumed": report.resumed,
        "failed": report.failed,
        "markers": sorted(markers.items()),
        "rows": queue.by_key(),
    }


def begun(directory: Path) -> list[tuple[tuple[str, int], int, int]]:
    """Session, number and process of each attempt."""
    found = (path.name.split(".") for path in directory.iterdir() if path.name.startswith("u_"))
    return [((uid, int(session)), int(n), int(pid)) for uid, session, n, pid in found]


def driver_in(directory: Path) -> int:
    (driver,) = directory.glob("driver.*")
    return int(driver.suffix[1:])


def journaled(dumps: Path) -> set[tuple[str, int]]:
    with (dumps / f"{STEP}.journal").open("rb") as file:
        read = [found for *_, found in frames(file, "here") if found is not None]
    return {(uid, key[-1]) for _, key, (_, _, uid, _) in read}


@functools.cache
def undisturbed() -> dict[str, list[int]]:
    """The rows of the step by key."""

    async def worker(prompt: Any, sampling: Any, session: Any) -> dict[str, Any]:
        return rows(session)

    queue = Logged()
    config = {"dispatch": {**CONFIG["dispatch"], "journal": False}}
    with RolloutDispatcher(LocalPool(worker, 1), queue, config) as dispatcher:
        dispatcher.submit(prompts(), step=STEP).result()
    return queue.by_key()


@pytest.mark.parametrize(
    ("killed", "who_journals"),
    [
        ("a worker", "the dispatcher"),
        ("a worker's node", "the workers"),
        ("the driver", "the dispatcher"),
        ("the driver's node", "the dispatcher"),
        ("the driver's node", "the workers"),
    ],
)
def test_a_kill_costs_what_was_not_journaled(
    cluster: Any, tmp_path: Path, killed: str, who_journals: str
) -> None:
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    first = cluster.add_node(num_cpus=2, resources={"first": 100})
    doomed, _ = (cluster.add_node(num_cpus=2, resources={"worker": 1}) for _ in range(2))
    dumps, attempts, later = tmp_path / "dumps", tmp_path / "attempts", tmp_path / "later"
    attempts.mkdir()
    later.mkdir()
    (later / "go").touch()
    start = ray.remote(num_cpus=0, max_retries=0)(drive)
    run = start.options(resources={"first": 1}).remote(str(dumps), str(attempts), who_journals)
    sessions = {(f"u_{i}", session) for i in range(PROMPTS) for session in range(N)}
    early = {(uid, session) for uid, session in sessions if session < EARLY}
    assert eventually(lambda: len(begun(attempts)) == len(sessions), 120)
    assert eventually(
        lambda: (dumps / f"{STEP}.journal").exists() and journaled(dumps) == early, 120
    )
    before = begun(attempts)
    by_pid = Counter(pid for *_, pid in before)
    assert len(by_pid) == 2, "both nodes have a worker"

    survives = killed.startswith("a worker")
    if killed == "the driver":
        os.kill(driver_in(attempts), signal.SIGKILL)
    elif killed == "the driver's node":
        kill(cluster, first)
    elif killed == "a worker":
        os.kill(before[0][-1], signal.SIGKILL)
    else:
        kill(cluster, doomed)
    if survives:
        (attempts / "go").touch()
        done = ray.get(run, timeout=200)
        again = {session for session, attempt, _ in begun(attempts) if attempt}
        pids = {pid for *_, pid in before}
        lost_by = {
            pid: {session for session, _, its in before if its == pid} - early for pid in pids
        }
        assert again in lost_by.values()
    else:
        with pytest.raises(ray.exceptions.RayError):
            ray.get(run, timeout=120)
        done = None
    there = journaled(dumps)
    assert there == (sessions if survives else early)

    # The next start, whose driver is on another node.
    second = start.options(resources={"head": 1})
    if killed == "a worker's node":
        cluster.add_node(num_cpus=2, resources={"worker": 1})
    next_run = ray.get(second.remote(str(dumps), str(later), who_journals), timeout=300)
    assert {session for session, *_ in begun(later)} == sessions - there
    assert len(begun(later)) == len(sessions - there)
    assert next_run["resumed"] == len(there)
    for finished in filter(None, (done, next_run)):
        assert finished["failed"] == {}
        assert [count for _, count in finished["markers"]] == [1] * len(sessions)
        assert finished["rows"].items() <= undisturbed().items()
        if who_journals == "the dispatcher":
            assert finished["rows"] == undisturbed()
    assert len(next_run["rows"]) >= len(there)
