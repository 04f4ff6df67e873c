"""What longest_first knows of a prompt: earlier batches, and dumps."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from rlskip.dispatch.history import History
from rlskip.store import StepStore


def test_history_of_a_prompt_orders_the_next_batch(make_dispatcher, make_prompts):
    order = []

    async def worker(prompt, sampling, session):
        order.append(session.sample_index)
        return {"responses": torch.ones(10 * (session.sample_index + 1))}

    dispatcher = make_dispatcher(
        worker, 1, n=2, policy="longest_first", max_concurrent_rollouts_per_worker=1
    )
    dispatcher.generate_sequences(make_prompts(3), step=1)
    assert order[:3] == [0, 1, 2]  # one probe each
    order.clear()
    dispatcher.generate_sequences(make_prompts(3), step=2)
    assert order == [2, 2, 1, 1, 0, 0]


def test_dumps_of_the_same_prompts_order_the_batch(make_dispatcher, make_prompts, tmp_path):
    order = []

    async def worker(prompt, sampling, session):
        order.append(session.sample_index)
        return {"responses": torch.ones(1)}

    store = StepStore(tmp_path)
    lengths = torch.tensor([2, 7, 4])
    dump = {"index": torch.arange(3), "response_mask": torch.arange(8) < lengths[:, None]}
    store.save(1, TensorDict(dump, batch_size=[3]))
    store.save(2, {"index": torch.arange(3)})  # says no lengths
    dispatcher = make_dispatcher(
        worker,
        1,
        n=2,
        policy="longest_first",
        history_fields=["index"],
        max_concurrent_rollouts_per_worker=1,
        more={"store": store},
    )
    dispatcher.generate_sequences(make_prompts(3, index=torch.arange(3)), step=3)
    assert order == [1, 1, 2, 2, 0, 0]


def test_odd_columns_of_a_dump_teach_nothing(tmp_path):
    store = StepStore(tmp_path)
    store.save(1, {"index": [1, 2], "response_mask": [[1, 1], [float("nan")]]})
    store.save(2, {"index": [3], "response_mask": ["text"]})
    store.save(3, {"index": torch.tensor(4), "response_mask": torch.tensor(1)})
    store.save(4, [1, 2, 3])
    store.save(5, {"index": [5], "response_mask": [None]})
    history = History(["index"])
    assert history.learn_dumps(store) >= 1
    assert history.expected(history.key({"index": 1})) == 2
    assert history.expected(history.key({"index": 2})) is None
