"""to_arrow, to_pandas, to_datasets: the rows of a run as tables, without what padding adds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import rlskip
from rlskip.errors import RlskipError
from rlskip.store import StepStore

DIRECTORY = "e_p/GBS2_N2_in2_out3"
TURNS = [
    {"uid": "p", "session_id": 0, "turn": 0, "prompt_ids": [1], "completion_ids": [2, 3],
     "logprobs": [-1.0, -2.0], "reward": 0.0, "raw_prompt": [{"role": "user", "content": "Hi"}],
     "completions": "there"},
    {"uid": "p", "session_id": 0, "turn": 1, "prompt_ids": [1, 2, 3, 9], "completion_ids": [4],
     "logprobs": [-3.0], "reward": 1.0, "raw_prompt": [], "completions": "yes"},
    {"uid": "p", "session_id": 1, "turn": 0, "prompt_ids": [1], "completion_ids": [5],
     "logprobs": None, "reward": None, "raw_prompt": [{"role": "user", "content": "Hi"}],
     "completions": "no"},
]  # fmt: skip


@pytest.mark.data
def test_a_table_has_the_rows_that_iter_rows_has(dumps: Path) -> None:
    run = rlskip.open(dumps)
    rows = list(run.iter_rows())
    assert run.to_arrow().to_pylist() == rows
    frame = run.to_pandas(["group", "reward", "response"])
    assert frame.reward.tolist() == [row["reward"] for row in rows]
    assert [list(cell) for cell in frame.response] == [row["response"] for row in rows]
    data = run.to_datasets(["prompt", "reward"])
    assert data.to_list() == list(run.iter_rows(["prompt", "reward"]))


NAMES = ["prompt", "response", "mask", "log_probs"]


@pytest.mark.data
@pytest.mark.parametrize(
    ("stored", "low", "span", "true"),
    [("u1", 0, 200, 1), ("u2", 0, 60_000, 300), ("i4", -(2**31), 2**32 - 1, -70_000),
     ("i8", -(2**62), 2**63 - 1, 2**40)],
)  # fmt: skip
def test_tokens_and_masks_are_the_same_however_narrow_they_are_stored(
    stored: str, low: int, span: int, true: int, tmp_path: Path
) -> None:
    rows, width = 100, 4
    spread = [low + i * span // (rows * width) for i in range(rows * width)]
    tokens = np.array(spread).reshape(rows, width)
    probs = -np.arange(tokens.size, dtype=np.float32).reshape(tokens.shape)
    columns = {
        "prompts": tokens[:, :1],
        "responses": tokens[:, 1:],
        "response_mask": true * np.tile([1, 0, 1], (rows, 1)),
        "rollout_log_probs": probs[:, 1:],
    }
    expected = [
        {"prompt": row[:1], "response": row[1:], "mask": [1, 0, 1], "log_probs": said[1:]}
        for row, said in zip(tokens.tolist(), probs.tolist(), strict=True)
    ]
    tensors = {name: torch.from_numpy(np.array(column)) for name, column in columns.items()}
    StepStore(tmp_path / DIRECTORY).save(1, TensorDict(tensors, [rows]))
    run = rlskip.open(tmp_path / DIRECTORY)
    for fields in (NAMES, None):
        (rollouts,) = run.rollouts(fields)
        read = rollouts.columns.columns
        assert read["responses"].dtype == stored == read["response_mask"].dtype
        table = run.to_arrow(fields)
        assert table.select(NAMES).to_pylist() == expected
        assert [{name: row[name] for name in NAMES} for row in run.iter_rows(fields)] == expected
        types = [str(table.schema.field(name).type.value_type) for name in NAMES]
        assert types == ["int64", "int64", "bool", "float"]
    own = run.to_arrow([*columns, "response"])
    for name, column in columns.items():
        assert own[name].to_pylist() == column.tolist()
        values = "float" if name == "rollout_log_probs" else "int64"
        assert str(own.schema.field(name).type.value_type) == values


@pytest.mark.data
def test_dtypes_are_kept_and_what_arrow_lacks_is_text(tmp_path: Path) -> None:
    import pyarrow as pa

    columns: dict[str, Any] = {
        "responses": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
        "half": torch.ones(2).bfloat16(),
        "image": torch.zeros(2, 3, 4, dtype=torch.uint8),
        "empty": torch.zeros(2, 0),
        "ragged": torch.nested.nested_tensor_from_jagged(
            torch.arange(3.0), torch.tensor([0, 1, 3])
        ),
        "within": TensorDict({"x": torch.ones(2)}, [2]),
    }
    store = StepStore(tmp_path / DIRECTORY)
    store.save(1, TensorDict(columns, [2]))
    swapped = np.array([1.5, 2.5], ">f8")
    mixed: list[dict[str, Any]] = [
        {"mixed": 1, "text": "é"},
        {"mixed": {"a": [1]}, "text": "b"},
    ]
    store.save(2, [{**row, "swapped": n} for row, n in zip(mixed, swapped, strict=True)])
    store.save(3, {"swapped": swapped, "text": [1, 2]})
    run = rlskip.open(tmp_path / DIRECTORY)
    schema = run[1].to_arrow().schema
    assert schema.field("response").type == pa.list_(pa.int32())
    assert schema.field("half").type == pa.float32()
    assert schema.field("ragged").type == pa.list_(pa.float32())
    assert run[1].to_arrow(["within", "empty"]).to_pylist()[0]["within"] == {"x": 1.0}
    assert run[2].to_arrow(["mixed"])["mixed"].to_pylist() == ["1", '{"a": [1]}']
    assert run[3].to_arrow()["swapped"].to_pylist() == [1.5, 2.5]
    with pytest.raises(RlskipError, match="text"):
        run.to_arrow()
    together = run[1:3].to_arrow()
    assert together["text"].to_pylist() == [None, None, "é", "b"]
    assert together["response"].to_pylist() == [[1, 2], [3, 4], None, None]


def test_a_session_has_its_conversation_in_one_piece(tmp_path: Path) -> None:
    StepStore(tmp_path / DIRECTORY).save(1, TURNS)
    first, second = rlskip.open(tmp_path / DIRECTORY).sessions()
    whole = first.conversation
    assert whole is not None
    assert (first.group, first.number, len(first.rows), first.reward) == ("p", 0, 2, 1.0)
    assert (whole.prompt, whole.completion) == ([1], [2, 3, 9, 4])
    assert whole.mask == [True, True, False, True]
    assert whole.log_probs == [-1.0, -2.0, None, -3.0]
    assert [one["role"] for one in first.messages or ()] == ["user", "assistant", "assistant"]
    assert (second.messages or ())[1] == {"role": "assistant", "content": "no"}
    assert second.reward is None


def test_a_conversation_leaves_out_what_a_rewritten_context_dropped(tmp_path: Path) -> None:
    rewritten = [TURNS[0], {**TURNS[1], "prompt_ids": [7, 8]}]
    StepStore(tmp_path / DIRECTORY).save(1, rewritten)
    (session,) = rlskip.open(tmp_path / DIRECTORY).sessions()
    whole = session.conversation
    assert whole is not None
    assert (whole.completion, whole.mask) == ([2, 3, 4], [True] * 3)


def test_a_missing_extra_is_named(dumps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    load = importlib.import_module

    def fail(name: str, *more: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return load(name, *more)

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(RlskipError, match="pyarrow") as error:
        rlskip.open(dumps).to_arrow()
    assert "rlskip[data]" in error.value.remedy
