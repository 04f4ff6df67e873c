"""A killed step resumes from its journal, and faults of the journal cost a warning only."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from rlskip.jobs.served import forget_served
from rlskip.keys import split_trajectory
from rlskip.queue import MemoryQueue
from rlskip.store import StepStore, dump
from tests.clock import eventually
from tests.dispatch.conftest import evict


async def worker(prompt, sampling, session):
    return {"responses": torch.tensor([session.seed % 1000, session.session_id])}


@pytest.fixture
def make(make_dispatcher, tmp_path):
    """Dispatchers with a journal, each as in a process that began just now."""

    def make(worker=worker, **more):
        forget_served()
        return make_dispatcher(worker, 2, journal=True, store=StepStore(tmp_path), **more)

    return make


@pytest.fixture
def dispatch(make):
    """Generate a batch in a run of its own: what one has generated itself, it never resumes."""

    def dispatch(prompts, worker=worker, step=1, queue=None, **more):
        queue = queue or MemoryQueue()
        dispatcher = make(worker, queue=queue, **more)
        report = dispatcher.submit(prompts, step=step).result()
        dispatcher.close()
        return queue, report

    return dispatch


@pytest.mark.parametrize("info", [{}, {"groups": 2}])
def test_a_journal_goes_once_the_dump_is_there(tmp_path, dispatch, make_prompts, info):
    """With the next step: the dump may be that of an earlier call than the one that was killed."""
    store, prompts = StepStore(tmp_path), make_prompts(2)
    dispatch(prompts, step=2)
    for step in (1, 2):
        store.save(step, {"rollouts": torch.ones(3)}, info=info)
        assert dispatch(prompts, step=step)[1].resumed == 8 * (step == 2)
    dispatch(prompts, step=3)
    assert sorted(path.name for path in tmp_path.glob("*.journal")) == ["3.journal"]
    assert store.steps() == [1, 2]


def test_a_journal_stays_while_a_prompt_of_its_step_is_queued(tmp_path, make, make_prompts, queue):
    """What is dumped of the step may be its other groups."""
    dispatcher = make()
    dispatcher.submit(make_prompts(2), step=1).result()
    StepStore(tmp_path).save(1, {"rollouts": torch.ones(3)}, info={"groups": 2})
    dispatcher.submit(make_prompts(1, of="later"), step=2).result()
    assert Path(tmp_path, "1.journal").exists()
    evict(queue, ["u_0", "u_1"])
    dispatcher.submit(make_prompts(1, of="last"), step=3).result()
    assert not Path(tmp_path, "1.journal").exists()


def test_what_is_resumed_is_what_the_worker_returned(dispatch):
    """Only what names the prompt is the new one's, whatever else the fields of a row are called."""

    async def worker(prompt, sampling, session):
        mine = {"meta_info": {"finish": "length"}, "request_id": "mine", "timing": torch.ones(2)}
        return [mine, {**mine, **prompt, "global_steps": 9}, {**mine, "uid": "another"}]

    def run(uid):
        prompt = {"uid": uid, "ids": [1], "meta_info": {"from": 1}, "global_steps": 1}
        queue, report = dispatch([prompt], worker, n=1)
        rows = [queue.get([f"{int(uid)}_0_{i}"], "train") for i in range(3)]
        return report.resumed, [{k: list(v) for k, v in row.items()} for row in rows]

    (none, first), (resumed, again) = run(torch.tensor(7)), run(torch.tensor(8))
    assert (none, resumed) == (0, 1)
    assert (first[1].pop("uid"), again[1].pop("uid")) == ([torch.tensor(7)], [torch.tensor(8)])
    assert str(again) == str(first)


def test_ranks_that_sample_the_same_prompts_resume_each_its_own(
    tmp_path, make_dispatcher, make_prompts
):
    drawn = []

    def run(rank, most):
        async def draw(prompt, sampling, session):
            if len(drawn) >= most:
                raise ValueError("the process ends here")
            drawn.append(len(drawn))
            return {"responses": torch.tensor([drawn[-1]])}

        forget_served()
        store = StepStore(tmp_path, rank=rank, world_size=2)
        one_by_one = {"n": 2, "max_concurrent_rollouts_per_worker": 1}
        queue = MemoryQueue()
        make_dispatcher(draw, 1, journal=True, store=store, queue=queue, **one_by_one).submit(
            make_prompts(1), step=1
        ).result()
        rows = [key for key in queue.list("train") if split_trajectory(key)]
        return sorted(map(int, queue.get(rows, "train")["responses"]))

    assert [run(0, 1), run(1, 2)] == [[0], [1]]
    assert [run(0, 9), run(1, 9)] == [[0, 2], [1, 3]]


def test_a_session_is_journaled_before_its_rows_are_in_the_queue(tmp_path, make, make_prompts):
    """Until the batch has ended the journal is one that grows. Validation has none."""
    journal, journaled = tmp_path / "1.journal", []

    class Watched(MemoryQueue):
        def put(self, keys, partition, fields=None, tags=None):
            if fields is not None:
                journaled.append((journal.exists(), *dump.in_use(tmp_path)))
            return super().put(keys, partition, fields, tags)

    dispatcher = make(queue=Watched(), n=1, val_n=1)
    dispatcher.submit(make_prompts(1), step=1).result()
    assert journaled == [(True, 1)]
    dispatcher.submit(make_prompts(1), step=2, validate=True).result()
    assert [*tmp_path.glob("[!.]*")] == [journal]
    assert eventually(lambda: not dump.in_use(tmp_path))


# -- faults ----------------------------------------------------------------------------------


INSTEAD = {
    "a directory": Path.mkdir,
    "a link": lambda path: path.symlink_to(path.with_name("precious")),
    "a FIFO": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a huge file": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
    "noise": lambda path: path.write_bytes(os.urandom(100_000)),
}


@pytest.mark.parametrize("what", INSTEAD)
def test_a_journal_that_cannot_be_used_costs_one_warning(
    tmp_path, dispatch, make_prompts, caplog, what
):
    (tmp_path / "precious").write_bytes(b"keep me")
    INSTEAD[what](tmp_path / "1.journal")
    _, report = dispatch(make_prompts(2))
    assert (report.succeeded, report.resumed) == (8, 0)
    assert len([r for r in caplog.records if "journal" in r.message]) == 1
    assert (tmp_path / "precious").read_bytes() == b"keep me"


def test_what_cannot_be_journaled_costs_one_warning_and_no_session(dispatch, make_prompts, caplog):
    async def odd(prompt, sampling, session):
        more = {"handle": object()} if session.session_id == 1 else {}  # no codec keeps it
        return {"responses": torch.ones(1), **more}

    class Slow(MemoryQueue):  # so that sessions gather
        def put(self, *args, **more):
            time.sleep(0.1)
            return super().put(*args, **more)

    queue, report = dispatch(make_prompts(3), odd, queue=Slow())
    assert report.failed == {}
    (warning,) = [r for r in caplog.records if "not journaled" in r.message]
    assert warning.levelno == logging.WARNING
    assert len(queue.list("train")) == 3 * (1 + 4 + 4), "all of them are in the queue"
    assert dispatch(make_prompts(3))[1].resumed == 9


@pytest.mark.parametrize("policy", ["least_loaded", "longest_first"])
def test_prompts_that_cannot_be_compared_cost_one_warning_and_no_session(dispatch, caplog, policy):
    def run(uid):
        prompts = [{"uid": uid, "ids": [1]}, {"uid": f"{uid}s", "ids": [2], "tool": object()}]
        return dispatch(prompts, n=1, policy=policy)[1]

    assert (run("a").succeeded, run("b").resumed) == (2, 1)
    first, _ = [record.message for record in caplog.records if "not journaled" in record.message]
    assert "prompts['tool']: cannot keep a builtins.object" in first


@pytest.mark.parametrize("call", ["sink.read_sessions", "journal.append_sessions"])
def test_a_disk_that_hangs_costs_one_warning(dispatch, make_prompts, caplog, monkeypatch, call):
    released, calls = threading.Event(), []
    monkeypatch.setattr("rlskip.dispatch.timeouts.WRITE_S", 0.3)
    monkeypatch.setattr(
        f"rlskip.dispatch.{call}", lambda *args: (calls.append(args), released.wait(60))[0]
    )
    _, report = dispatch(make_prompts(2), max_concurrent_rollouts_per_worker=1)
    released.set()
    assert len(calls) == 1
    assert report.succeeded == 8
    warnings = [r.message for r in caplog.records if "not journaled" in r.message]
    assert len(warnings) == 1
    assert "did not answer within 0.3 s" in warnings[0]
