"""The trainer's node is killed: its dumps are complete or absent, and its lease ends in time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlskip.jobs.lease import SingleFlight
from rlskip.store import DumpError, StepStore

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]

TTL_S = 6.0


def train(folder: str, steps: int, pause_s: float) -> list[int]:
    """Generate and save what is missing of steps 1, 2, ...; returns the steps generated."""
    store = StepStore(folder)
    flight = SingleFlight(store.directory, ttl_s=TTL_S, poll_s=0.1)
    generated = []
    for step in range(1, steps + 1):
        lease = flight.enter(step, lambda step=step: store.read_meta(step) is not None)  # type: ignore[misc]
        if lease is None:
            continue
        with lease:
            time.sleep(pause_s)
            rollouts = {"tokens": torch.randint(0, 50_000, (256, 2048)), "step": step}
            store.save(step, rollouts)
            generated.append(step)
    return generated


@pytest.mark.parametrize("killed", ["while it generates", "while it saves"])
def test_no_half_dump_and_no_lease_for_longer_than_its_time(
    make_nodes: Callable[[], Any], tmp_path: Path, killed: str
) -> None:
    import ray

    nodes = make_nodes()

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    doomed = nodes.add("first")
    nodes.add("second")
    steps = 60
    task = ray.remote(max_retries=0)(train)
    pause_s = 3600.0 if killed == "while it generates" else 0.0
    run = task.options(resources={"first": 1}).remote(str(tmp_path), steps, pause_s)
    store = StepStore(tmp_path)
    deadline = time.monotonic() + 60
    lease = tmp_path / ".leases" / "1"
    while not (lease.exists() if pause_s else len(store.listed()) >= 3):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    nodes.kill(doomed)
    died = time.monotonic()
    with pytest.raises(ray.exceptions.RayError):
        ray.get(run, timeout=120)
    before = store.listed()
    for step in before:
        store.load(step)
    assert before == list(range(1, len(before) + 1))
    held = list((tmp_path / ".leases").iterdir())
    assert len(held) <= 1

    last = len(before) + 1
    again = task.options(resources={"second": 1}).remote(str(tmp_path), last, 0.0)
    assert ray.get(again, timeout=120) == [last]
    assert time.monotonic() - died < 100
    for step in range(1, last + 1):
        try:
            assert store.load(step)["step"] == step
        except DumpError as error:
            pytest.fail(str(error))
    assert not list((tmp_path / ".leases").iterdir())
