"""Every test here is of the job `job`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlskip import SkipManager
from rlskip.queue import MemoryQueue
from tests.clock import MockClock
from tests.skip.trainers import Trainer


def each_in_turn(some: Iterable[Any], others: Collection[Any]) -> list[Any]:
    """Each with one of the others in its turn; the whole product is long."""
    return [
        pytest.param(one, other, marks=() if i % len(others) == j else pytest.mark.long)
        for i, one in enumerate(some)
        for j, other in enumerate(others)
    ]


@pytest.fixture(autouse=True)
def _job(job: None) -> None: ...


@pytest.fixture
def init(tmp_path: Path) -> Callable[..., Path]:
    """``init(role="rollout", own={}, host={}, at=None, **skip)`` begins a run, `at` a step.

    Returns its dump_dir. The role has keys of its `own`; `host` is the rest of the application's
    config.
    """

    def start(
        role: str = "rollout", own: Any = None, host: Any = None, at: Any = None, **skip: Any
    ) -> Path:
        skip.setdefault("dump_dir", str(tmp_path / "dumps"))
        node = {**skip, role: {"enable": True, **(own or {})}}
        SkipManager.init({**(host or {}), "skip": node})
        if at is not None:
            SkipManager.set_step(at)
        return Path(skip["dump_dir"])

    return start


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MockClock:
    """By what the time is measured that a stage takes."""
    clock = MockClock()
    monkeypatch.setattr("rlskip.skip.call.time", SimpleNamespace(perf_counter=clock))
    return clock


@pytest.fixture(
    params=["memory", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.timeout(180)])]
)
def queue(request: pytest.FixtureRequest) -> Any:
    if request.param == "ray":
        return request.getfixturevalue("adapter")
    return MemoryQueue()


@pytest.fixture
def run(queue: Any, init: Callable[..., Path]) -> Callable[..., Trainer]:
    """A new run: ``run(model, replay={...}, **skip)``."""

    def start(model: str = "counted", replay: Any = None, **skip: Any) -> Trainer:
        init("rollout_tq", **skip)
        return Trainer(queue, model, **(replay or {}))

    return start


@pytest.fixture
def dumped(init: Callable[..., Path]) -> Callable[..., Trainer]:
    """A MemoryQueue's run whose step 3 dumped these prompts; then a fresh run with `skip`."""

    def start(batch: dict[str, Any], **skip: Any) -> Trainer:
        init("rollout_tq")
        Trainer(MemoryQueue()).step(3, batch)
        init("rollout_tq", **skip)
        return Trainer(MemoryQueue())

    return start
