"""What longest_first knows of a prompt from earlier batches."""

from __future__ import annotations

import torch

from tests.dispatch.conftest import evict


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
