"""Sessions with every kind of fault: whatever happens, each has exactly one marker."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from rlskip.dispatch import (
    DataFailure,
    InfrastructureFailure,
    LocalPool,
    RolloutDispatcher,
    timeouts,
)
from rlskip.keys import split_session, split_trajectory

FAULTS = [
    "row", "rows", "error", "io", "data", "infrastructure", "nothing", "odd", "nan", "key", "exit",
    "interrupt", "generator", "cancelled", "hangs", "refused",
]  # fmt: skip


async def faulty(prompt, sampling, session):
    draw = random.Random(f"{session.uid}/{session.session_id}/{session.attempt}")
    fault = draw.choice(FAULTS)
    if draw.random() < 0.3:
        await asyncio.sleep(draw.random() * 0.01)
    match fault:
        case "error":
            raise ValueError("bad prompt")
        case "io":
            raise ConnectionError("engine")
        case "data":
            raise DataFailure("bad prompt")
        case "infrastructure":
            raise InfrastructureFailure("gone")
        case "nothing":
            return []
        case "odd":
            return "text"
        case "nan":
            return {"response_mask": torch.tensor([float("nan")])}
        case "key":
            return {1: 2}
        case "exit":
            raise SystemExit(1)
        case "interrupt":
            raise KeyboardInterrupt
        case "generator":
            raise GeneratorExit
        case "cancelled":
            raise asyncio.CancelledError
        case "hangs" if draw.random() < 0.02:
            await asyncio.Event().wait()
        case "refused":
            return {"responses": torch.ones(1), "odd": (i for i in "abc")}
        case "rows":
            return [{"responses": torch.ones(i + 1)} for i in range(3)]
    return {"responses": torch.ones(2)}


@pytest.mark.parametrize(
    "sessions",
    [
        2000,
        pytest.param(
            100_000, marks=[pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]
        ),
    ],
)
def test_each_session_has_exactly_one_marker(queue, sessions, monkeypatch):
    monkeypatch.setattr(timeouts, "LOOP_S", 600)  # a busy machine may hold the event loop for long
    config = {
        "dispatch": {
            "rollout_level": True,
            "n": 10,
            "policy": "longest_first",
            "max_concurrent_rollouts": 512,
            "session_timeout_s": 5,
            "max_retries": 1,
        }
    }
    batches = 1 if sessions < 10_000 else 10
    with RolloutDispatcher(LocalPool(faulty, 8), queue, config) as dispatcher:
        for step in range(batches):
            prompts = [{"uid": f"{step}_{i}"} for i in range(sessions // batches // 10)]
            report = dispatcher.submit(prompts, step=step).result(600)
            assert report.sessions == sessions // batches
            assert report.succeeded + len(report.failed) == report.sessions
            assert 0 < len(report.failed) < report.sessions
    # One put a marker, except that a batch-wise put that is refused is tried again one by one.
    tags = queue.list("train")
    finals = {key: tag for key, tag in tags.items() if split_session(key)}
    assert len(finals) == sessions
    seen: dict[str, list[dict]] = {}
    for key, tag in queue.markers():
        seen.setdefault(key, []).append(tag)
    assert all(len({repr(tag) for tag in found}) == 1 for found in seen.values())
    rows: dict[str, int] = {}
    for key in filter(split_trajectory, tags):
        uid, session, _ = split_trajectory(key)
        if finals[f"{uid}_sess{session}"]["status"] == "success":
            rows[f"{uid}_sess{session}"] = rows.get(f"{uid}_sess{session}", 0) + 1
    succeeded = {key: tag for key, tag in finals.items() if tag["status"] == "success"}
    assert {key: tag["rows"] for key, tag in succeeded.items()} == rows
