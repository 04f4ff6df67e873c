"""What slime and miles save of a run, imported: samples, evaluations, data of the trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import rlskip as package
from tests.interop.conftest import RUN

# As slime's Sample.to_dict (slime/utils/types.py) and torch.save(dict(rollout_id=...)) make them.
SAMPLE = {
    "group_index": 5, "index": 40, "prompt": "q", "tokens": [1, 2, 3, 4], "response": "xy",
    "response_length": 2, "label": "42", "reward": 1.0, "loss_mask": None,
    "rollout_log_probs": [-0.5, -0.25], "status": "completed", "metadata": {"a": 1},
    "session_id": None, "weight_versions": ["3"], "spec_info": {"completion_token_num": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", ["7.pt", "rollout_7.pt"])
@pytest.mark.parametrize("more", [{"rollout_id": 7}, {"rollout_id": 7, "metadata": {}}, {}])
def test_samples_of_slime_and_miles_become_a_step(
    imported: Any, tmp_path: Path, name: str, more: dict[str, Any]
) -> None:
    other = {**SAMPLE, "index": 41, "loss_mask": [0, 1], "reward": 0.0, "rollout_log_probs": None}
    torch.save({**more, "samples": [SAMPLE, other]}, tmp_path / name)
    first, second = imported(tmp_path / name, "--trust-pickle")
    assert (first["step"], first["group"], first["session"], first["reward"]) == (7, "5", 0, 1.0)
    assert (first["prompt"], first["response"]) == ([1, 2], [3, 4])
    assert (first["mask"], first["log_probs"]) == ([1, 1], [-0.5, -0.25])
    assert (second["mask"], second["log_probs"], second["session"]) == ([0, 1], None, 1)
    for name_in_slime, kept in (("prompt", "own_prompt"), ("response", "own_response")):
        assert first[kept] == SAMPLE[name_in_slime]
    lost = {"prompt", "tokens", "response", "response_length", "loss_mask", "rollout_log_probs",
            "reward"}  # fmt: skip
    assert {key: first[key] for key in SAMPLE.keys() - lost} == {
        key: SAMPLE[key] for key in SAMPLE.keys() - lost
    }


def test_evaluations_of_slime_are_validation(rlskip: Any, tmp_path: Path) -> None:
    for name, reward in (("7", 1.0), ("eval_7", 0.5)):
        sample = {"rollout_id": 7, "samples": [{**SAMPLE, "reward": reward}]}
        torch.save(sample, tmp_path / f"{name}.pt")
    options = ("--trust-pickle", "-d", tmp_path / "in", "--run", RUN, "--json")
    said = rlskip("import", tmp_path, *options).json
    assert [(one["role"], one["nbytes"] is None) for one in said] == [
        ("rollout", False), ("rollout_val", False)
    ]  # fmt: skip
    for run, reward in ((RUN, 1.0), (f"{RUN}/rollout_val", 0.5)):
        assert said.pop(0)["run"] == run
        (row,) = package.open(tmp_path / "in" / run).iter_rows()
        assert (row["step"], row["reward"]) == (7, reward)


def test_a_pickle_needs_trust_and_runs_nothing(rlskip: Any, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "owned"),)

    torch.save({"rollout_id": 1, "samples": [{**SAMPLE, "metadata": Evil()}]}, tmp_path / "1.pt")
    refused = rlskip("import", tmp_path / "1.pt", "-d", tmp_path / "in")
    assert (refused.code, "--trust-pickle" in refused.err) == (2, True)
    trusted = rlskip("import", tmp_path / "1.pt", "-d", tmp_path / "in", "--trust-pickle")
    assert (trusted.code, "names posix.mkdir" in trusted.err) == (2, True)
    assert not (tmp_path / "owned").exists()
    for data in ({}, {"tokens": [torch.ones(2)]}, [1], None):
        torch.save({"rollout_id": 1, "rank": 0, "rollout_data": data}, tmp_path / "1.pt")
        other = rlskip("import", tmp_path / "1.pt", "-d", tmp_path / "in", "--trust-pickle")
        assert (other.code, str(tmp_path / "1.pt") in other.err) == (2, True)


def test_what_many_samples_share_is_imported(imported: Any, tmp_path: Path) -> None:
    shared = {"prompt": "a system prompt " * 500, "metadata": {"data_source": "gsm8k"}}
    samples = [{**SAMPLE, **shared, "index": i, "tokens": list(range(i % 200 + 9))}
               for i in range(2000)]  # fmt: skip
    torch.save({"rollout_id": 7, "samples": samples}, tmp_path / "7.pt")
    rows = imported(tmp_path / "7.pt", "--trust-pickle")
    assert [row["own_prompt"] for row in rows] == [shared["prompt"]] * 2000


def train_dump(rank: int, samples: list[int], shift: float = 0.0, last: bool = True) -> Any:
    """What slime's ``save_debug_train_data`` saves of a rank after ``train_actor``.

    Tensors are those of ``_get_rollout_data`` and ``compute_advantages_and_returns``; only the last
    stage of a pipeline has what the model computes.
    """
    lengths = [2 + i % 3 for i in samples]

    def each(value: float, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        return [torch.full((n,), value, dtype=dtype) for n in lengths]

    data: dict[str, Any] = {
        "tokens": [torch.arange(10 * i, 10 * i + 3 + n) for i, n in zip(samples, lengths)],  # noqa: B905
        "response_lengths": lengths,
        "total_lengths": [3 + n for n in lengths],
        "rewards": [0.5 - i % 2 for i in samples],
        "raw_reward": [float(i % 2) for i in samples],
        "truncated": [0 for _ in samples],
        "sample_indices": samples,
        "loss_masks": each(1, torch.int32),
        "rollout_log_probs": each(-0.5),
        "metadata": [{"a": i} for i in samples],
        "num_microbatches": [1, 1],
        "global_batch_sizes": [4, 4],
        "micro_batch_indices": [[0], [1]],
    }
    if last:
        for name, value in (("ref_log_probs", -0.75), ("log_probs", -0.625 + shift)):
            data[name] = each(value)
        data |= {"advantages": each(1.0), "returns": each(1.0)}
    return {"rollout_id": 7, "rank": rank, "rollout_data": data}


def test_train_dumps_of_slime_become_stages(rlskip: Any, tmp_path: Path) -> None:
    for job, shift in (("a", 0.0), ("b", 0.25)):
        folder = tmp_path / job
        folder.mkdir()
        # Two data-parallel ranks, of a pipeline of two: ranks 0 and 2 have the same samples.
        for rank, last in ((0, False), (1, False), (2, True), (3, True)):
            some = [0, 1] if rank % 2 == 0 else [2, 3]
            moved = shift if rank == 3 else 0.0
            torch.save(train_dump(rank, some, moved, last), folder / f"7_{rank}.pt")
        done = rlskip("import", folder, "-d", tmp_path / "in", "--trust-pickle")
        assert (done.code, done.err) == (0, "")
        assert f"stages/{job}_imported" in done.out
    where = tmp_path / "in" / "stages"
    again = rlskip("import", folder, "-d", tmp_path / "in", "--trust-pickle")
    assert again.out.count("exists already") == 4
    same = rlskip("compare", where / "a_imported", where / "a_imported")
    assert same.code == 0, same.out
    differs = rlskip("compare", where / "a_imported", where / "b_imported", "--json")
    assert differs.code == 1
    (step,) = differs.json["steps"]
    stages = {one["stage"]: one["state"] for one in step["stages"]}
    records = {one["stage"]: one["records"] for one in step["stages"]}
    assert (records["rewards"], records["advantages"]) == (2, 2), "what two ranks hold counts once"
    assert stages.keys() == {
        "rollouts", "mask", "engine_log_probs", "old_log_probs", "ref_log_probs", "advantages",
        "returns", "rewards", "scores", "truncated",
    }  # fmt: skip
    assert [name for name, state in stages.items() if state != "equal"] == ["old_log_probs"]
    engine = rlskip("compare", where / "a_imported", "--json")
    assert engine.json["steps"][0]["all"]["mean"] == pytest.approx(0.125)
