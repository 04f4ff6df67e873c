"""Nothing that the dispatcher waits for can keep it, its callers or the process waiting."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import itertools
import re
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from rlskip.dispatch import POLICIES, InfrastructureFailure, LocalPool, timeouts
from rlskip.keys import split_session, split_trajectory
from rlskip.queue import MemoryQueue, transfer_queue
from tests.clock import eventually
from tests.dispatch.conftest import LoggedQueue

LIMIT = 100.0  # seconds of a test's own waits; the deadlines of the dispatcher add up to 5
BLOCKS_S = 1000.0  # longer than a test may take


@pytest.fixture(autouse=True)
def short_deadlines(monkeypatch):
    monkeypatch.setattr(timeouts, "WRITE_S", 0.3)
    monkeypatch.setattr(timeouts, "TURN_S", 0.2)
    monkeypatch.setattr(timeouts, "OPEN_S", 0.5)
    monkeypatch.setattr(timeouts, "CLOSE_S", 0.3)


class Fault:
    """Blocks until the test ends, or raises; `hits` counts how often."""

    def __init__(self, error: type[BaseException] | None) -> None:
        self.error = error
        self.released = threading.Event()
        self.hits = 0

    def __call__(self, *_: object) -> None:
        self.hits += 1
        if self.error is not None:
            raise self.error("fault")
        self.released.wait(BLOCKS_S)


@pytest.fixture(
    params=[None, asyncio.CancelledError, SystemExit, StopIteration, MemoryError],
    ids=lambda e: "blocks" if e is None else e.__name__,
)
def fault(request):
    fault = Fault(request.param)
    yield fault
    fault.released.set()


class Faulty(LoggedQueue):
    """Its puts have the fault where `where` says so of their keys."""

    def __init__(self, fault, where):
        super().__init__()
        self.fault, self.where = fault, where

    def put(self, keys, partition, fields=None, tags=None):
        if self.where(keys[0]):
            self.fault()
        return super().put(keys, partition, fields, tags)


async def answer(prompt, sampling, session):
    return {"responses": torch.ones(3)}


@pytest.fixture
def make(make_dispatcher):
    usual = {"n": 3, "session_timeout_s": 0.3, "max_retries": 0, "max_data_retries": 0}

    def make(worker=answer, **more):
        return make_dispatcher(worker, 2, replay={"timeout_s": 0.5}, **{**usual, **more})

    return make


# -- the queue -------------------------------------------------------------------------------

PUTS = {
    "roots": lambda key: not split_session(key) and not split_trajectory(key),
    "rows": split_trajectory,
    "markers": split_session,
}


@pytest.mark.parametrize("what", PUTS)
def test_a_write_to_the_queue(make, fault, make_prompts, what):
    queue = Faulty(fault, PUTS[what])
    batch = make(queue=queue).submit(make_prompts(2), step=1)
    if what == "rows" and fault.error is not None:
        # The queue takes markers: each session has one, which names the error.
        failed = batch.result(LIMIT).failed
        assert len(failed) == 6
        assert all("rows could not be written" in cause for cause in failed.values())
        assert sum(bool(split_session(key)) for key in queue.list("train")) == 6
    elif what == "rows":
        with contextlib.suppress(InfrastructureFailure):  # or a report of failed sessions
            assert len(batch.result(LIMIT).failed) == 6
        assert batch.done()
    else:
        expected = InfrastructureFailure if fault.error is None else Exception
        with pytest.raises(expected) as raised:
            batch.result(LIMIT)
        assert not isinstance(raised.value, TimeoutError)
    assert fault.hits


@pytest.mark.parametrize("first", range(8))
@pytest.mark.parametrize("count", [1, 2, 999])
def test_a_fault_of_the_queue_is_an_error_and_costs_no_marker_twice(make, first, count):
    calls = itertools.count()
    queue = Faulty(Fault(OSError), lambda key: first <= next(calls) < first + count)
    one_by_one = {"max_concurrent_rollouts_per_worker": 1, "session_timeout_s": 30}
    batch = make(queue=queue, **one_by_one).submit([{"uid": f"u{i}"} for i in range(2)], step=1)
    with contextlib.suppress(OSError):
        batch.result(LIMIT)
    assert batch.done()
    report = batch.report
    assert report.succeeded + len(report.failed) + report.open == report.sessions == 6
    marked = [key for key, _ in queue.markers()]
    assert len(marked) == len(set(marked)) <= 6


def test_a_queue_that_stalls_gets_nothing_more_until_it_answers(make):
    stalled, released, puts = threading.Event(), threading.Event(), []

    class Stalling(MemoryQueue):
        def put(self, keys, partition, fields=None, tags=None):
            puts.extend(keys)
            if split_trajectory(keys[0]) and not stalled.is_set():
                stalled.set()
                released.wait(BLOCKS_S)
            return super().put(keys, partition, fields, tags)

    queue = Stalling()
    dispatcher = make(queue=queue, session_timeout_s=5)
    for uid in "ab":
        with pytest.raises(InfrastructureFailure, match="did not answer within"):
            dispatcher.submit([{"uid": uid}], step=1).result(LIMIT)
    released.set()
    assert eventually(lambda: "rlskip-queue" not in str(threading.enumerate())), "it has returned"
    assert dispatcher.submit([{"uid": "c"}], step=2).result(LIMIT).failed == {}
    assert not [key for key in puts if key.startswith("b")]
    markers = [key for key in puts if split_session(key)]
    assert len(markers) == len(set(markers)), "what was written late has no other marker"


# -- workers -----------------------------------------------------------------------


def test_without_a_deadline_close_ends_what_a_worker_holds(make, make_prompts, queue):
    released = threading.Event()

    async def worker(prompt, sampling, session):
        released.wait(BLOCKS_S * (session.attempt == 0))
        return {"responses": torch.ones(1)}

    pool = LocalPool(worker, 2)
    dispatcher = make(pool, session_timeout_s=None)
    batch = dispatcher.submit(make_prompts(2), step=1)
    with pytest.raises(TimeoutError, match=r"step 1: 6 of 6 sessions have not ended after 0\.5 s"):
        batch.result(0.5)
    assert (batch.done(), batch.report.succeeded) == (False, 0)
    dispatcher.close()
    assert set(batch.result(0).failed.values()) == {"cancelled"}
    assert len(queue.markers()) == 6
    assert make(pool, max_retries=9).submit(make_prompts(2, of="v"), step=2).result().failed == {}
    released.set()


def test_a_policy(make, fault, make_prompts, queue, monkeypatch):
    monkeypatch.setitem(POLICIES, "odd", fault)
    dispatcher = make(policy="odd")
    with pytest.raises(Exception, match="fault" if fault.error else "no batch after"):
        dispatcher.collect(make_prompts(2), step=1)
    if fault.error is not None:
        with pytest.raises(Exception, match="fault"):
            dispatcher.submit(make_prompts(2), step=1).result(LIMIT)
    assert fault.error is None or len(queue.markers()) == 6, "every session is marked"


# -- callers ---------------------------------------------------------------------------------


def test_a_caller_that_stops_waiting_leaves_the_batch_going_on(make, make_prompts):
    release = threading.Event()

    def worker(prompt, sampling, session):
        release.wait(20)
        return {"responses": torch.ones(3)}

    submit, inner = make(worker, session_timeout_s=30).submit, Future()
    batch = submit(make_prompts(2), step=1)
    batch.add_done_callback(lambda _: inner.set_result(submit(make_prompts(1, of="v"), step=2)))

    async def impatient():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(batch, 0.1)
        assert not batch.done()
        waiting = asyncio.ensure_future(batch)
        await asyncio.sleep(0.05)
        waiting.cancel()
        release.set()
        return await batch

    assert asyncio.run(impatient()).succeeded == 6
    assert batch.result(0).succeeded == 6
    assert inner.result(20).result(20).succeeded == 3, "a callback may use the dispatcher"


def test_the_list_of_waits_is_that_of_the_code():
    """docs/dispatch.md names each deadline; those of this module are shortened by the fixture."""
    text = (Path(__file__).parents[2] / "docs" / "dispatch.md").read_text()
    section = text.split("## Deadlines")[1].split("\n## ")[0]
    rows = dict(line.strip("| ").split(" | ") for line in section.splitlines() if " | " in line)
    listed = [int(number) for cell in rows.values() for number in re.findall(r"\d+", cell)]
    source = Path(timeouts.__file__).read_text()
    ours = re.findall(r"^([A-Z]+_S) = ([^#\n]*)", source, re.MULTILINE)
    values = {name: ast.literal_eval(value) for name, value in ours}
    write, close, start = values["WRITE_S"], values["CLOSE_S"], values["START_S"]
    assert listed == [
        values["TURN_S"], values["ASK_S"], write, values["OPEN_S"], start, transfer_queue.START_S,
        transfer_queue.CALL_S, close, close, values["EXIT_S"],
    ]  # fmt: skip
    assert start < values["OPEN_S"], "the error that names what Ray has comes first"
