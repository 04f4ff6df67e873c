"""What a dispatcher writes for a batch, and what it takes for one."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from rlskip.batch.columns import uids_of
from rlskip.dispatch import BatchError, LocalPool
from rlskip.errors import RlskipError
from rlskip.queue import ReplayBuffer
from tests.dispatch.conftest import evict


def test_a_buffer_knows_of_every_prompt_once_it_is_submitted(make_dispatcher, queue):
    """Else it takes a step for finished whose other batch it does not know yet."""

    async def parent(prompt, sampling, session):
        if prompt["uid"] == "a":
            made[0].submit([{"uid": "child"}], step=1)
        return {"x": 1}

    put, made = queue.put, [make_dispatcher(parent, n=1)]
    queue.put = lambda *args, **more: (time.sleep(0.03), put(*args, **more))[1]
    for uid in "abc":
        made[0].submit([{"uid": uid}], step=1)
        assert uid in queue.list("train")
    made[0].submit([{"uid": "d"}], step=1).result(20)
    batch, _ = ReplayBuffer(queue).sample(1, "train")
    assert {*batch.extra_info["rollout_root_keys"]} == {*"abcd", "child"}


def test_without_rollout_level_the_sessions_of_a_prompt_stay_on_one_worker(
    make_dispatcher, make_prompts, queue, echo
):
    workers = {}

    class Worker:
        async def __call__(self, prompt, sampling, session):
            workers.setdefault(session.uid, set()).add(id(self))
            return await echo(prompt, sampling, session)

    dispatcher = make_dispatcher(Worker, rollout_level=False, policy="round_robin")
    assert dispatcher.submit(make_prompts(4), step=1).result().succeeded == 16
    assert [len(used) for used in workers.values()] == [1] * 4
    assert {tag["n"] for key, tag in queue.list("train").items() if key.count("_") == 1} == {4}


def test_each_prompt_has_its_own_n_and_sampling(make_dispatcher, make_prompts, queue):
    seen = {}

    async def worker(prompt, sampling, session):
        seen[session.uid, session.session_id] = sampling
        assert "__rollout_n__" not in prompt
        return {"responses": torch.ones(1)}

    prompts = make_prompts(
        3, __rollout_n__=torch.tensor([1, 2, 3]), __do_sample__=NonTensorStack(True, False, True)
    )
    usual, val = {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.1}
    dispatcher = make_dispatcher(worker, sampling=usual, val_sampling=val, val_n=2)
    assert dispatcher.submit(prompts, step=1).result().sessions == 6
    root = {"is_prompt": True, "global_steps": 1, "n": 3, "expected_rollouts": 3}
    assert queue.list("train")["u_2"] == root
    assert seen["u_0", 0] == usual
    assert seen["u_1", 1] == {"temperature": 0, "top_p": 1.0, "top_k": -1}

    seen.clear()
    prompts = make_prompts(2, __do_sample__=torch.tensor([True, False]))
    dispatcher.submit(prompts, step=1, validate=True).result()
    assert queue.list("val")["u_0"]["n"] == 2
    assert list(seen.values()) == [val] * 4


@pytest.mark.parametrize("uids", [torch.tensor([7, 8]), np.array([7, 8]), NonTensorStack(7, 8)])
def test_uids_of_any_kind_are_named_as_the_role_for_queues_names_them(make_dispatcher, echo, uids):
    batch = TensorDict({"uid": uids, "input_ids": torch.ones(2, 3, dtype=torch.long)}, [2])
    rows, _ = make_dispatcher(echo, n=1).collect(batch, step=1)
    assert list(dict.fromkeys(rows["uid"])) == uids_of(batch) == ["7", "8"]


def test_a_queue_or_a_pool_has_one_dispatcher_at_a_time(make_dispatcher, make_prompts, echo):
    pool = LocalPool(echo)
    earlier, later = make_dispatcher(echo), make_dispatcher(pool)
    with pytest.raises(RlskipError, match="another RolloutDispatcher has this pool"):
        make_dispatcher(pool, queue=None)
    with pytest.raises(RlskipError, match="another RolloutDispatcher was made for this queue"):
        earlier.collect(make_prompts(1), step=1)
    assert later.submit(make_prompts(1), step=1).result(20).succeeded == 4
    later.close()
    assert earlier.submit(make_prompts(1, of="v"), step=2).result(20).succeeded == 4


@pytest.mark.parametrize("odd", ["a_sess1", "a_0_0", "a_7_1000000"])
@pytest.mark.parametrize("together", [False, True])
def test_a_uid_is_no_key_of_another_prompt(make_dispatcher, odd, together):
    """Else a marker or a row of the one is the root of the other."""

    async def worker(prompt, sampling, session):
        await asyncio.sleep(60)

    dispatcher, prompts = make_dispatcher(worker), [{"uid": "a"}, {"uid": odd}]
    if not together:
        dispatcher.submit(prompts[:1], step=1)
    with pytest.raises(BatchError, match=f"'{odd}' is a key of a session of the prompt 'a'"):
        dispatcher.submit(prompts if together else prompts[1:], step=1)


def test_a_prompt_that_the_queue_still_holds_is_not_submitted_again(
    make_dispatcher, make_prompts, queue, echo
):
    """Else sessions of the earlier step make its group complete at once, whoever wrote them."""
    make_dispatcher(echo).submit(make_prompts(2), step=1).result(20)
    dispatcher, buffer = make_dispatcher(echo), ReplayBuffer(queue)
    for sampled in (False, True):
        batch = buffer.sample(1, "train")[0] if sampled else None
        with pytest.raises(BatchError, match="still holds earlier prompts of the uids u_0, u_1"):
            dispatcher.submit(make_prompts(2), step=2)
    buffer.clear(batch)
    dispatcher.submit(make_prompts(2), step=2).result(20)
    assert len(buffer.sample(2, "train")[0]) == 16


def test_history_of_a_prompt_orders_the_next_batch(make_dispatcher, make_prompts, queue):
    order = []

    async def worker(prompt, sampling, session):
        order.append(session.sample_index)
        return {"responses": torch.ones(10 * (session.sample_index + 1))}

    dispatcher = make_dispatcher(
        worker, 1, n=2, policy="longest_first", max_concurrent_rollouts_per_worker=1
    )
    dispatcher.submit(make_prompts(3), step=1).result()
    assert order[:3] == [0, 1, 2]  # one probe each
    order.clear()
    evict(queue, ["u_0", "u_1", "u_2"])
    dispatcher.submit(make_prompts(3), step=2).result()
    assert order == [2, 2, 1, 1, 0, 0]
