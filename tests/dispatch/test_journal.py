from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack

from rlskip.dispatch import LocalPool, RolloutDispatcher
from rlskip.queue import MemoryQueue
from rlskip.store import Identity, StepStore
from rlskip.store.journal import SessionJournal

IDENTITY = Identity(n=4, sampling={"temperature": 1.0})


def write(path: Path, count: int) -> None:
    journal = SessionJournal(path, IDENTITY)
    for i in range(count):
        journal.append({("content", 0, i): [{"responses": torch.full((5,), i), "text": str(i)}]})
    journal.close()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_torn_tail_costs_the_last_frame_only(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("journal") / "3.journal"
    write(path, 4)
    whole = path.read_bytes()
    starts = [i for i in range(len(whole)) if whole.startswith(b"rlsjrnl\n", i)]
    ends = [*starts[1:], len(whole)]
    cut = data.draw(st.integers(0, len(whole) - 1))
    noise = data.draw(st.binary(max_size=40))
    path.write_bytes(whole[:cut] + noise)

    journal = SessionJournal(path, IDENTITY)
    frames = sum(end <= cut for end in ends)
    kept = max(0, frames - 1)  # the first frame is the identity
    assert [key[2] for key in journal.entries] == list(range(kept))
    # And it can be appended to.
    journal.append({("content", 0, 9): [{"responses": torch.ones(2)}]})
    journal.close()
    again = SessionJournal(path, IDENTITY)
    assert [key[2] for key in again.entries] == [*range(kept), 9]


def test_an_altered_frame_is_not_read(tmp_path):
    path = tmp_path / "3.journal"
    write(path, 3)
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    assert len(SessionJournal(path, IDENTITY).entries) == 2


def test_values_come_back_exactly(tmp_path):
    write(tmp_path / "3.journal", 2)
    entries = SessionJournal(tmp_path / "3.journal", IDENTITY).entries
    (row,) = entries["content", 0, 1]
    assert row["text"] == "1"
    assert torch.equal(row["responses"], torch.full((5,), 1))


def test_a_journal_of_another_identity_is_set_aside(tmp_path, caplog):
    path = tmp_path / "3.journal"
    write(path, 2)
    other = SessionJournal(path, Identity(n=4, sampling={"temperature": 0.5}))
    assert other.entries == {}
    assert "sampling.temperature" in caplog.text
    assert not path.exists()
    assert len(list(tmp_path.iterdir())) == 1


def test_another_model_is_resumed_with_a_warning(tmp_path, caplog):
    path = tmp_path / "3.journal"
    write(path, 2)
    journal = SessionJournal(path, attrs.evolve(IDENTITY, model="another"))
    assert len(journal.entries) == 2
    assert "model: 'another' now" in caplog.text


def test_a_file_that_is_no_journal_is_started_over(tmp_path):
    path = tmp_path / "3.journal"
    path.write_bytes(b"something else entirely")
    journal = SessionJournal(path, IDENTITY)
    journal.append({"a": 1})
    journal.close()
    assert SessionJournal(path, IDENTITY).entries == {"a": 1}


# -- with the dispatcher ---------------------------------------------------------------------


def dispatch(store, prompts, worker, step=1, **more):
    queue = MemoryQueue()
    config = {"dispatch": {"rollout_level": True, "n": 4, "journal": True, **more}}
    with RolloutDispatcher(LocalPool(worker, 2), queue, config, store=store) as dispatcher:
        report = dispatcher.generate_sequences(prompts, step=step)
    return queue, report


async def worker(prompt, sampling, session):
    return {"responses": torch.tensor([session.seed % 1000, session.session_id])}


def test_only_what_is_missing_is_generated(tmp_path, make_prompts):
    store = StepStore(tmp_path)
    ran = []

    async def failing(prompt, sampling, session):
        ran.append((session.uid, session.session_id))
        if session.session_id == 2:
            raise ValueError("not this time")
        return await worker(prompt, sampling, session)

    dispatch(store, make_prompts(3), failing)
    ran.clear()
    prompts = make_prompts(3)
    # Content counts, uids do not.
    prompts["uid"] = NonTensorStack(*(f"other_{i}" for i in range(3)))
    queue, report = dispatch(store, prompts, worker)
    assert (report.resumed, report.attempts, report.succeeded) == (9, 3, 12)
    whole, _ = dispatch(StepStore(tmp_path / "fresh"), prompts, worker)
    assert queue.list("train") == whole.list("train")


def test_prompts_of_equal_content_have_sessions_of_their_own(tmp_path):
    prompts = [{"uid": f"u{i}", "input_ids": torch.ones(3)} for i in range(3)]
    dispatch(StepStore(tmp_path), prompts, worker)
    queue, report = dispatch(StepStore(tmp_path), prompts, worker)
    assert (report.resumed, report.attempts) == (12, 0)
    rows = queue.get([f"u{i}_0_0" for i in range(3)], "train")["responses"]
    assert len({tuple(row.tolist()) for row in rows}) == 3


def test_other_sampling_seed_or_step_resumes_nothing(tmp_path, make_prompts):
    store = StepStore(tmp_path)
    dispatch(store, make_prompts(2), worker)
    assert dispatch(store, make_prompts(2), worker, step=2)[1].resumed == 0
    assert dispatch(store, make_prompts(2), worker, seed=1)[1].resumed == 0
    assert dispatch(store, make_prompts(2), worker, sampling={"top_p": 0.5})[1].resumed == 0


def test_a_journal_goes_once_the_dump_is_there(tmp_path, make_prompts):
    store = StepStore(tmp_path)
    dispatch(store, make_prompts(2), worker, step=1)
    assert (tmp_path / "1.journal").exists()
    store.save(1, {"rollouts": torch.ones(3)})
    dispatch(store, make_prompts(2), worker, step=2)
    assert sorted(path.name for path in tmp_path.glob("*.journal")) == ["2.journal"]
    assert store.steps() == [1]


def test_what_cannot_be_journaled_is_not_lost(tmp_path, make_prompts, caplog):
    async def odd(prompt, sampling, session):
        return {"responses": torch.ones(1), "handle": Handle()}

    class Handle:  # no codec keeps it
        pass

    queue, report = dispatch(StepStore(tmp_path), make_prompts(1), odd)
    assert report.failed == {}
    assert "not journaled" in caplog.text
    assert len(queue.list("train")) == 1 + 4 + 4


RUN = """
    import json, sys, time, torch
    from rlskip.dispatch import LocalPool, RolloutDispatcher
    from rlskip.queue import MemoryQueue
    from rlskip.keys import split_trajectory
    from rlskip.store import StepStore

    directory, stop_at = sys.argv[1], int(sys.argv[2])
    ran = 0

    async def worker(prompt, sampling, session):
        global ran
        if ran >= stop_at:
            import asyncio
            await asyncio.sleep(600)
        ran += 1
        generator = torch.Generator().manual_seed(session.seed)
        return {"responses": torch.randint(0, 1000, (20,), generator=generator)}

    prompts = [{"uid": f"{time.time_ns()}", "input_ids": torch.full((4,), i)} for i in range(10)]
    queue = MemoryQueue()
    config = {"dispatch": {"rollout_level": True, "n": 10, "journal": True,
                           "max_concurrent_rollouts": 4}}
    dispatcher = RolloutDispatcher(LocalPool(worker, 2), queue, config, store=StepStore(directory))
    batch = dispatcher.submit(prompts, step=5)
    while batch.report().succeeded < min(stop_at, 100):
        time.sleep(0.01)
    print("there", flush=True)
    report = batch.result()
    uids = [prompt["uid"] for prompt in prompts]
    rows = {k: queue.get([k], "train")["responses"][0].tolist()
            for k in queue.list("train") if split_trajectory(k)}
    by_place = {f"{uids.index(k.rsplit('_', 2)[0])}/{k.rsplit('_', 2)[1]}": v
                for k, v in rows.items()}
    print(json.dumps({"ran": ran, "resumed": report.resumed, "rows": by_place}))
"""


def run(directory: Path, stop_at: int) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(RUN), str(directory), str(stop_at)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )


def finish(process: subprocess.Popen) -> dict:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1])


@pytest.mark.timeout(200)
def test_a_step_killed_at_nine_tenths_resumes(tmp_path):
    whole = run(tmp_path / "whole", 1000)
    killed = run(tmp_path / "killed", 90)
    assert killed.stdout.readline() == "there\n"
    time.sleep(0.1)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait(timeout=30)
    killed.stdout.close()

    resumed = finish(run(tmp_path / "killed", 1000))
    whole = finish(whole)
    assert (resumed["resumed"], resumed["ran"]) == (90, 10)
    assert (whole["resumed"], whole["ran"]) == (0, 100)
    assert resumed["rows"] == whole["rows"]
