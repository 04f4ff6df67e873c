"""Workers of this process: kinds, caps, isolation, determinism."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack

from rlskip.dispatch import (
    LocalPool,
)
from rlskip.dispatch import RolloutDispatcher as Dispatcher
from rlskip.keys import split_trajectory
from rlskip.queue import MemoryQueue


def test_caps_hold(make_dispatcher, make_prompts):
    running, most = Counter(), Counter()

    class Worker:
        async def __call__(self, prompt, sampling, session):
            for key in (id(self), "all"):
                running[key] += 1
                most[key] = max(most[key], running[key])
            await asyncio.sleep(0.002)
            for key in (id(self), "all"):
                running[key] -= 1
            return {"responses": torch.ones(1)}

    caps = {"max_concurrent_rollouts_per_worker": 2, "max_concurrent_rollouts": 5}
    make_dispatcher(Worker, **caps).generate_sequences(make_prompts(8), step=1)
    assert most.pop("all") == 5
    assert max(most.values()) == 2


def test_workers_of_every_kind(make_dispatcher, make_prompts, queue):
    def blocking(prompt, sampling, session):
        return {"responses": torch.ones(3), "thread": threading.current_thread().name}

    class Made:
        def __init__(self, value):
            self.value = value

        def __call__(self, prompt, sampling, session):
            return {"responses": torch.full((self.value,), 1)}

    async def partial(value, prompt, sampling, session):
        return {"responses": torch.ones(value)}

    kinds = [blocking, functools.partial(Made, 3), Made(3), functools.partial(partial, 3)]
    for step, worker in enumerate(kinds):
        report = make_dispatcher(worker, 2).generate_sequences(make_prompts(2), step=step)
        assert (report.succeeded, report.tokens) == (8, 24)


def test_sessions_of_a_prompt_share_nothing(make_dispatcher, make_prompts, queue):
    async def worker(prompt, sampling, session):
        prompt["input_ids"].add_(1)
        prompt["messages"].append(session.session_id)
        sampling["seed"] = session.seed
        return {"responses": prompt["input_ids"], "said": len(prompt["messages"])}

    prompts = make_prompts(2, messages=NonTensorStack(["hi"], ["ho"]))
    dispatcher = make_dispatcher(worker, 1, sampling={"temperature": 1.0})
    assert dispatcher.generate_sequences(prompts, step=1).failed == {}
    rows = queue.get([f"u_0_{i}_0" for i in range(4)], "train")
    assert list(rows["said"]) == [2] * 4
    assert all(row.tolist() == list(range(1, 9)) for row in rows["responses"])
    assert prompts["input_ids"][0].tolist() == list(range(8))


@pytest.mark.parametrize("policy", ["chunk", "least_loaded", "longest_first"])
def test_the_same_rollouts_from_any_number_of_workers(make_prompts, policy, echo):
    def rollouts(workers):
        queue = MemoryQueue()
        config = {"dispatch": {"rollout_level": True, "n": 4, "policy": policy}}
        with Dispatcher(LocalPool(echo, workers), queue, config) as dispatcher:
            dispatcher.generate_sequences(make_prompts(5), step=7)
        keys = sorted(filter(split_trajectory, queue.list("train")))
        rows = queue.get(keys, "train")["responses"].unbind()
        return [(key, row.tolist()) for key, row in zip(keys, rows, strict=True)]

    assert rollouts(1) == rollouts(4)


def test_a_blocking_worker_gets_no_more_sessions_than_it_has_threads(make_prompts, queue):
    def worker(prompt, sampling, session):
        time.sleep(0.6)
        return {"responses": torch.ones(3)}

    config = {"dispatch": {"rollout_level": True, "n": 4, "session_timeout_s": 1.7}}
    with Dispatcher(LocalPool(worker, 1, threads=1), queue, config) as dispatcher:
        report = dispatcher.generate_sequences(make_prompts(1), step=1)
    # Handed out at once, the third and the fourth would wait past their deadline.
    assert report.failed == {}
    assert report.attempts == 4


@pytest.mark.parametrize("workers", [0, None, 1.5, "2"])
def test_a_pool_has_a_whole_number_of_workers(workers: Any) -> None:
    with pytest.raises(ValueError, match="at least one worker"):
        LocalPool(lambda session, sample: [], workers)
