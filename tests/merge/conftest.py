import pytest

from tests.merge.batches import turns


@pytest.fixture
def two_turns():
    """One trajectory of two turns that merge: prompt 10, then 20, observed 30, then 40 41."""
    return turns(([10], [20]), ([10, 20, 30], [40, 41])) | {
        "rewards": [[1.0], [0.0, 5.0]],
        "stop_reasons": ["continue", "eos"],
        "rollout_metrics": None,
        "rollout_logprobs": [[-0.5], [-0.3, -0.4]],
        "trajectory_ids": ["a", "a"],
    }
