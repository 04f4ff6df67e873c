from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rlskip.dispatch import build_trajectory_info, extract_sample, session_seed


def test_a_sample_shares_no_memory_with_its_batch():
    numbers, big = torch.arange(1024), np.arange(1000)
    views = [numbers[i : i + 3] for i in range(64)]
    batch = TensorDict(
        {
            "ids": numbers.reshape(64, 16),
            "ragged": torch.nested.as_nested_tensor(views, layout=torch.jagged),
            "uid": NonTensorStack(*[f"u_{i}" for i in range(64)]),
            "images": NonTensorStack(*[{"pixels": big[i : i + 2]} for i in range(64)]),
            "views": NonTensorStack(*[[view] for view in views]),
            "validate": NonTensorData(True),
        },
        batch_size=[64],
    )
    sample = extract_sample(batch, 5)
    assert (sample["uid"], sample["validate"]) == ("u_5", True)
    tensors = sample["ids"], sample["ragged"], sample["views"][0]
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [16 * 8, 3 * 8, 3 * 8]
    assert sample["images"]["pixels"].base is None
    sample["views"].append("more")
    sample["ids"].zero_()
    again = extract_sample(batch, 5)
    assert [tensor.tolist() for tensor in again["views"]] == [[5, 6, 7]]
    assert again["ids"].tolist() == list(range(80, 96))


@pytest.mark.parametrize("index", [torch.tensor([7, 7, 9]), np.array([7, 7, 9]), [7, 7, 9]])
@pytest.mark.parametrize("step", [3, torch.tensor(3), np.int64(3)])
def test_trajectory_info_is_plain_python(index, step):
    info = build_trajectory_info(step, index, torch.tensor(False))
    assert info == [
        {"step": 3, "sample_index": 7, "rollout_n": 0, "validate": False},
        {"step": 3, "sample_index": 7, "rollout_n": 1, "validate": False},
        {"step": 3, "sample_index": 9, "rollout_n": 0, "validate": False},
    ]
    assert {type(value) for entry in info for value in entry.values()} == {int, bool}


def test_seeds_are_stable_and_differ():
    # Rollouts of released versions must come again: this number may never change.
    assert session_seed(0, 1, 2, 3) == 1907333553982502131
    seeds = {session_seed(*key) for key in np.ndindex(2, 3, 16, 8)}
    assert len(seeds) == 2 * 3 * 16 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
