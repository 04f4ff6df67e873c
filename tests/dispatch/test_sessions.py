from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rlskip.dispatch import build_trajectory_info, extract_sample, session_seed


def storage_bytes(value: torch.Tensor) -> int:
    return value.untyped_storage().nbytes()


def test_a_sample_shares_no_memory_with_its_batch():
    big = np.arange(1000)
    batch = TensorDict(
        {
            "input_ids": torch.arange(1024 * 8).reshape(1024, 8),
            "ragged": torch.nested.as_nested_tensor(
                [torch.arange(1 + i % 3) for i in range(1024)], layout=torch.jagged
            ),
            "uid": NonTensorStack(*[f"u_{i}" for i in range(1024)]),
            "messages": NonTensorStack(
                *[[{"role": "user", "content": str(i)}] for i in range(1024)]
            ),
            "images": NonTensorStack(*[{"pixels": big[i : i + 2]} for i in range(1024)]),
            "views": NonTensorStack(*[[torch.arange(1024)[i : i + 1]] for i in range(1024)]),
            "scalar": torch.arange(1024),
            "validate": NonTensorData(True),
        },
        batch_size=[1024],
    )
    sample = extract_sample(batch, 5)
    assert sample["uid"] == "u_5"
    assert sample["validate"] is True
    assert sample["scalar"].item() == 5
    assert sample["ragged"].tolist() == [0, 1, 2]
    assert storage_bytes(sample["input_ids"]) == 8 * 8
    assert storage_bytes(sample["ragged"]) == 3 * 8
    assert storage_bytes(sample["views"][0]) == 8
    assert sample["images"]["pixels"].base is None
    sample["messages"].append("more")
    sample["input_ids"].zero_()
    again = extract_sample(batch, 5)
    assert again["messages"] == [{"role": "user", "content": "5"}]
    assert again["input_ids"].tolist() == list(range(40, 48))


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
