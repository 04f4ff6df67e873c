from __future__ import annotations

import asyncio
import json
import re
import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlskip.dispatch.timeline import Span, lanes
from rlskip.errors import RlskipError

times = st.integers(0, 40)


@given(st.lists(st.tuples(st.integers(0, 2), times, times), max_size=30))
def test_lanes_never_overlap(drawn):
    spans = [
        Span(worker, 0, "u", i, 0, 0.0, min(a, b), max(a, b) + 1)
        for i, (worker, a, b) in enumerate(drawn)
    ]
    occupied = set()
    for span, lane in zip(spans, lanes(spans), strict=True):
        cells = {(span.worker, lane, t) for t in range(int(span.started), int(span.ended))}
        assert not cells & occupied
        occupied |= cells
    # As few as there are sessions at once.
    for worker in {span.worker for span in spans}:
        mine = [s for s in spans if s.worker == worker]
        most = max(sum(s.started <= t < s.ended for s in mine) for t in range(42))
        used = [lane for s, lane in zip(spans, lanes(spans), strict=True) if s.worker == worker]
        assert max(used) + 1 == most


def test_a_batch_writes_its_timeline(make_dispatcher, make_prompts, tmp_path):
    pytest.importorskip("matplotlib")

    async def worker(prompt, sampling, session):
        await asyncio.sleep(0.01)
        if session.session_id == 1 and session.attempt == 0:
            raise OSError("again, please")
        return {"responses": torch.ones(7)}

    dispatcher = make_dispatcher(
        worker, 2, timeline_dir=str(tmp_path), max_concurrent_rollouts_per_worker=1
    )
    report = dispatcher.generate_sequences(make_prompts(3), step=4)
    assert (tmp_path / "train-4.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "train-4.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {0: "queue", 1: "worker 0", 2: "worker 1"}
    runs = [e for e in events if e["ph"] == "X"]
    assert len(runs) == report.attempts == 12 + 3
    failed = [e for e in runs if e["cat"] == "failed"]
    assert [e["args"]["error"] for e in failed] == ["OSError: again, please"] * 3
    assert sum(e["args"]["tokens"] for e in runs) == report.tokens == 12 * 7
    assert all(e["dur"] >= 10_000 and e["args"]["queued_s"] >= 0 for e in runs)
    assert {e["args"]["attempt"] for e in runs} == {0, 1}
    assert max(e["args"]["queued_s"] for e in runs) >= 0.03  # behind others on its worker
    ends = {e["args"]["uid"]: e["ts"] + e["dur"] for e in failed}
    again = [e for e in runs if e["args"]["attempt"]]
    assert all(e["ts"] - 1e6 * e["args"]["queued_s"] >= ends[e["args"]["uid"]] - 2 for e in again)
    assert sum(e["ph"] == "b" for e in events) == sum(e["ph"] == "e" for e in events) == 15


def test_each_batch_of_a_step_has_its_own_timeline(make_dispatcher, make_prompts, tmp_path):
    pytest.importorskip("matplotlib")

    async def worker(prompt, sampling, session):
        return {"responses": torch.ones(1)}

    dispatcher = make_dispatcher(worker, timeline_dir=str(tmp_path))
    for count in (1, 2):
        dispatcher.generate_sequences(make_prompts(count), step=4)
    for file, sessions in (("train-4.json", 4), ("train-4-2.json", 8)):
        events = json.loads((tmp_path / file).read_text())["traceEvents"]
        assert sum(event["ph"] == "X" for event in events) == sessions


def test_a_cancelled_attempt_is_drawn(make_dispatcher, make_prompts, tmp_path):
    started = threading.Event()

    async def worker(prompt, sampling, session):
        started.set()
        await asyncio.sleep(60)

    dispatcher = make_dispatcher(worker, timeline_dir=str(tmp_path), max_concurrent_rollouts=1)
    batch = dispatcher.submit(make_prompts(1), step=4)
    assert started.wait(30)
    batch.cancel()
    batch.result(60)
    events = json.loads((tmp_path / "train-4.json").read_text())["traceEvents"]
    (run,) = [e for e in events if e["ph"] == "X"]
    assert (run["cat"], run["args"]["error"]) == ("failed", "cancelled")


def test_progress_shows_sessions_and_tokens(make_dispatcher, make_prompts, capsys):
    pytest.importorskip("tqdm")

    async def worker(prompt, sampling, session):
        await asyncio.sleep(0.1)  # a bar is drawn ten times a second
        if (session.uid, session.session_id) == ("u_0", 0):
            raise ValueError("bad prompt")
        return {"responses": torch.ones(7)}

    caps = {"max_concurrent_rollouts": 3, "max_data_retries": 0}
    make_dispatcher(worker, progress=True, **caps).generate_sequences(make_prompts(3), step=4)
    said = capsys.readouterr().err
    assert "step 4" in said
    assert "/12" in said
    assert "failed=1" in said
    assert re.search(r"tok/s=[\d,]+", said)
    assert re.search(r"\[\d\d:\d\d<\d\d:\d\d", said)  # the time taken, and that left


def test_a_progress_bar_without_tqdm_says_what_to_install(
    make_dispatcher, make_prompts, echo, monkeypatch
):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(RlskipError, match="tqdm") as error:
        make_dispatcher(echo, progress=True).generate_sequences(make_prompts(1), step=1)
    assert error.value.where == "dispatch.progress"
