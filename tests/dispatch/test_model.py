"""Whatever sessions, callers and the queue do: each batch gets its own rows, and no other's.

Two callers collect batches of the same step, a third takes the oldest groups, a fourth cancels a
batch, and a fifth reads its groups from the queue. Workers write into what they are given, reuse
their buffers, fail in every way, and cancel all tasks that they find. What must come out depends on
what each session does at each of its attempts, which is drawn by its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import threading
import time
from collections import Counter, UserDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rlskip.dispatch import (
    DataFailure,
    InfrastructureFailure,
    LocalPool,
    RolloutDispatcher,
    session_seed,
)
from rlskip.keys import split_session, split_trajectory
from rlskip.queue import IncompleteRolloutError, ReplayBuffer
from tests.dispatch.conftest import LoggedQueue

RETRIES, DATA_RETRIES = 2, 1


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


class Uncopyable:
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot be copied")


class Exits:
    def sum(self) -> int:
        raise SystemExit(3)


def refused(buffer: torch.Tensor) -> Any:
    return {"x": buffer, "odd": (i for i in "abc")}


def raises(error: Any, *args: Any) -> Any:
    def fault(buffer: torch.Tensor) -> Any:
        raise error(*args)

    return fault


# What an attempt does with its worker's buffer.
DATA = {
    "error": raises(ValueError, "bad prompt"),
    "data": raises(DataFailure, "bad prompt"),
    "exit": raises(SystemExit, 2),
    "interrupt": raises(KeyboardInterrupt),
    "stop": raises(StopIteration),
    "unprintable": raises(Unprintable),
    "long": raises(ValueError, "x" * 10_000_000),
    "no rows": lambda buffer: [],
    "a nested row": lambda buffer: {"x": TensorDict({"a": buffer}, [])},
    "text": lambda buffer: "text",
    "a number as a name": lambda buffer: {1: buffer},
}
MACHINE = {
    "io": raises(ConnectionError, "no route"),
    "memory": raises(MemoryError),
    "cancelled": raises(asyncio.CancelledError),
    "infrastructure": raises(InfrastructureFailure, "gone"),
}
# The queue refuses the rows, which collect() does not: the session fails without another attempt.
FINAL = {"refused": refused, "uncopyable": lambda buffer: {"x": buffer, "odd": Uncopyable()}}
FAULTS = {**DATA, **MACHINE, **FINAL}
FINE = {
    "row": lambda buffer: {"x": buffer, "meta": {"again": [buffer]}},
    "a mapping of another kind": lambda buffer: UserDict(x=buffer),
    "a TensorDict": lambda buffer: TensorDict({"x": buffer}, []),
    "rows": lambda buffer: [{"x": buffer, "turn": i} for i in range(3)],
    "a field that only shares the name": lambda buffer: {"x": buffer, "response_mask": 7},
    "a mask that ends the loop": lambda buffer: {"x": buffer, "response_mask": Exits()},
}


@attrs.frozen
class Plan:
    """What each attempt at each session does."""

    seed: int
    faulty: float
    blocking: bool
    cancels: bool

    def does(self, uid: str, session: int, attempt: int) -> str:
        draw = random.Random(f"{self.seed}/{uid}/{session}/{attempt}")
        faults = FAULTS if uid.startswith("4") else {**DATA, **MACHINE}
        return draw.choice(list(faults if draw.random() < self.faulty else FINE))

    def attempts(self, uid: str, session: int) -> tuple[int, bool]:
        """The number of the last attempt, and whether it succeeds."""
        failed: Counter[bool] = Counter()
        for attempt in range(RETRIES + DATA_RETRIES + 2):
            what = self.does(uid, session, attempt)
            if what in FINE:
                return attempt, True
            failed[what in MACHINE] += 1
            if what in FINAL or failed[True] > RETRIES or failed[False] > DATA_RETRIES:
                break
        return attempt, False


def make_worker(plan: Plan) -> type:
    class Worker:
        def __init__(self) -> None:
            self.local = threading.local()

        def generate(self, prompt: Any, sampling: Any, session: Any) -> Any:
            used = prompt["ids"].any() or prompt["turns"] or sampling["stop"]
            assert not used, "each session has copies of its own"
            prompt["ids"].add_(1)
            prompt["turns"].append(sampling["stop"].append(session))
            if not hasattr(self.local, "buffer"):
                self.local.buffer = torch.zeros(5, dtype=torch.int64)
            buffer = self.local.buffer
            place = *map(int, session.uid.split("-")), session.session_id
            buffer.copy_(torch.tensor([*place, session.seed]))
            what = plan.does(session.uid, session.session_id, session.attempt)
            return {**FAULTS, **FINE}[what](buffer)

    class Blocking(Worker):
        def __call__(self, prompt: Any, sampling: Any, session: Any) -> Any:
            return self.generate(prompt, sampling, session)

    class Async(Worker):
        async def __call__(self, prompt: Any, sampling: Any, session: Any) -> Any:
            if plan.cancels and session.attempt == 0 and session.session_id == 1:
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()
            await asyncio.sleep(0)
            return self.generate(prompt, sampling, session)

    return Blocking if plan.blocking else Async


KINDS = {
    "a class": lambda made: made,
    "a partial of a class": functools.partial,
    "an object": lambda made: made(),
    "a function": lambda made: made().__call__,
    "a partial of a function": lambda made: functools.partial(made().__call__),
}


def prompts_of(uids: Any) -> list[dict[str, Any]]:
    return [{"uid": uid, "ids": torch.zeros(2), "turns": []} for uid in uids]


def check_ended(dispatcher: RolloutDispatcher, queue: LoggedQueue, n: int) -> None:
    """Nothing is left, and of each prompt its root was put, then rows, then a session's marker."""
    state = dispatcher._groups
    assert not state.batches
    assert not any(state._scheduler._load.values())
    assert not any(ahead._groups for ahead in state.ahead.values())
    assert queue.list("train") == {}
    for uid, keys in queue.by_prompt().items():
        assert keys[0] == uid, "its root is put first"
        marked = [key for key in keys if split_session(key)]
        assert len(marked) == len(set(marked)) == n, "each session has one marker"
        for session in range(n):
            mine = [k for k in keys if (split_trajectory(k) or ("", -1))[1] == session]
            assert all(keys.index(k) < keys.index(f"{uid}_sess{session}") for k in mine)


CALLS = {
    "plan": st.builds(
        Plan,
        seed=st.integers(0, 10**6),
        faulty=st.sampled_from([0.0, 0.1, 0.4]),
        blocking=st.booleans(),
        cancels=st.booleans(),
    ),
    "kind": st.sampled_from([*KINDS]),
    "workers": st.integers(1, 3),
    "n": st.integers(1, 3),
    "policy": st.sampled_from(["chunk", "round_robin", "least_loaded", "longest_first"]),
    "cap": st.sampled_from([None, 1, 2]),
}


@pytest.mark.parametrize("examples", [30, pytest.param(100, marks=pytest.mark.slow)])
def test_each_caller_gets_its_own_rows(examples):
    tried = given(**CALLS)(each_caller_gets_its_own_rows)
    settings(max_examples=examples)(tried)()


def each_caller_gets_its_own_rows(plan, kind, workers, n, policy, cap):
    dispatch = {
        "rollout_level": True, "n": n, "val_n": n, "policy": policy, "seed": 5,
        "sampling": {"stop": []}, "val_sampling": {"stop": []},
        "max_concurrent_rollouts_per_worker": cap,
        "max_retries": RETRIES, "max_data_retries": DATA_RETRIES, "session_timeout_s": 60,
        "fill_missing": True,
    }  # fmt: skip
    config = {"dispatch": dispatch, "replay": {"timeout_s": 60}}
    queue = LoggedQueue()
    pool = LocalPool(KINDS[kind](make_worker(plan)), workers)
    dispatcher = RolloutDispatcher(pool, queue, config)
    buffer = ReplayBuffer(queue, config)

    def collect(caller: int) -> None:
        for number in range(2):
            uids = [f"{caller}-{number}-{i}" for i in range(2)]
            ends = {(u, s): plan.attempts(u, s) for u in uids for s in range(n)}
            try:
                rows, _ = dispatcher.collect(prompts_of(uids), step=1)
            except IncompleteRolloutError as error:
                causes = {(p.uid, s): cause for p in error.prompts for s, cause in p.failed}
                assert all(10 < len(cause) < 3000 for cause in causes.values())
                failed = set(causes)
                expected = {place for place, (_, fine) in ends.items() if not fine}
                assert failed == expected or plan.cancels
                for (uid, session), cause in causes.items():
                    what = plan.does(uid, session, ends[uid, session][0])
                    kind = "infrastructure: " if what in MACHINE else "data: "
                    assert cause.startswith(kind) or plan.cancels
                continue
            assert plan.cancels or all(fine for _, fine in ends.values())
            expected = sorted(
                [caller, number, prompt, session, session_seed(5, 1, prompt, session)]
                for prompt, uid in enumerate(uids)
                for session in range(n)
                for _ in range(rows_of(plan, uid, session, rows))
            )
            assert sorted(row.tolist() for row in rows["x"]) == expected

    def rows_of(plan: Plan, uid: str, session: int, rows: Any) -> int:
        if plan.cancels:  # any of its attempts may be the one that counts
            places = zip(rows["uid"], rows["session_id"].tolist(), strict=True)
            return sum(place == (uid, session) for place in places)
        return 3 if plan.does(uid, session, plan.attempts(uid, session)[0]) == "rows" else 1

    def cancel() -> None:
        prompts = prompts_of(f"2-0-{i}" for i in range(3))
        batch = dispatcher.submit(prompts, step=1, validate=True)
        time.sleep(random.Random(plan.seed).random() / 200)
        batch.cancel()
        report = batch.result(60)
        assert report.succeeded + len(report.failed) == report.sessions == 3 * n
        buffer.evict([f"2-0-{i}" for i in range(3)], "val")

    def ahead() -> None:
        """Calls take what no other one has taken; no uid is in flight twice."""
        uids = {f"3-0-{i}" for i in range(4)}
        prompts: list[dict[str, Any]] | None = prompts_of(sorted(uids))
        seen: list[str] = []
        while len(seen) < 4:
            try:
                rows, _ = dispatcher.collect(prompts, step=1, batch_size=1)
                seen += {*rows["uid"]}
            except IncompleteRolloutError as error:
                seen += [prompt.uid for prompt in error.prompts]
            prompts = None
        assert {*seen} == uids

    def sink() -> None:
        """Its groups come out of the queue, each with its root first and one marker a session."""
        uids = {f"4-0-{i}" for i in range(3)}
        report = dispatcher.submit(prompts_of(uids), step=1).result(60)
        with contextlib.suppress(IncompleteRolloutError):
            batch, _ = buffer.sample(1, "train")
            assert {*batch.extra_info["rollout_root_keys"]} == uids
            assert not report.failed
        buffer.evict(uids, "train")

    with ThreadPoolExecutor(5) as callers:
        done = [callers.submit(collect, caller) for caller in range(2)]
        done += [callers.submit(call) for call in (ahead, cancel, sink)]
        for call in done:
            call.result(120)
    dispatcher.close()
    check_ended(dispatcher, queue, n)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("blocking", [False, True])
def test_a_hundred_thousand_faulty_sessions_all_end(blocking, caplog):
    """Each batch ends, with one marker a session, and nothing is left of it."""
    caplog.set_level("CRITICAL")
    prompts, n, batches = (1000, 8, 13) if not blocking else (250, 8, 5)
    plan = Plan(seed=1, faulty=0.2, blocking=blocking, cancels=not blocking)
    dispatch = {
        "rollout_level": True, "n": n, "max_retries": RETRIES, "max_data_retries": DATA_RETRIES,
        "session_timeout_s": 60, "max_concurrent_rollouts_per_worker": 16, "sampling": {"stop": []},
    }  # fmt: skip
    queue = LoggedQueue()
    with RolloutDispatcher(
        LocalPool(make_worker(plan), 4), queue, {"dispatch": dispatch}
    ) as dispatcher:
        buffer = ReplayBuffer(queue)
        for number in range(batches):
            uids = [f"4-{number}-{i}" for i in range(prompts)]
            report = dispatcher.submit(prompts_of(uids), step=number).result(600)
            assert report.succeeded + len(report.failed) == report.sessions == prompts * n
            assert 0 < len(report.failed) < report.sessions
            buffer.evict(uids, "train")
            check_ended(dispatcher, queue, n)
