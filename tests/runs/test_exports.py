"""Rows as lines of JSON, chat messages, Parquet and tables, without what padding adds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

import rlskip
import rlskip as package
from rlskip.errors import RlskipError
from rlskip.runs.conversation import Conversation
from rlskip.store import StepStore

# -- `rlskip export` ---------------------------------------------------------------------------


RUN = "e_p/GBS1_N2_in1_out4"

ASKED = [{"role": "user", "content": "Hi"}]
TURNS = [
    {"uid": "p", "session_id": 0, "turn": 0, "prompt_ids": [1], "completion_ids": [2, 3],
     "logprobs": [-1.0, -2.0], "reward": 0.0, "raw_prompt": ASKED, "completions": "there"},
    {"uid": "p", "session_id": 0, "turn": 1, "prompt_ids": [1, 2, 3, 9], "completion_ids": [4],
     "logprobs": [-3.0], "reward": 1.0, "raw_prompt": [], "completions": "yes"},
    {"uid": "p", "session_id": 1, "turn": 0, "prompt_ids": [1], "completion_ids": [5],
     "logprobs": None, "reward": None, "raw_prompt": ASKED, "completions": "no"},
]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    StepStore(tmp_path / "dumps" / RUN).save(3, TURNS)
    return tmp_path / "dumps" / RUN


def test_rows_of_a_whole_run_in_a_file(rlskip: Any, run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert rlskip("export", run_dir, "--to", "jsonl", "--out", out).code == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows == list(package.open(run_dir).iter_rows())
    said = rlskip("export", run_dir, "--to", "jsonl", "--out", out)
    assert (said.code, "exists already" in said.err) == (2, True)


def test_rows_are_json_that_anybody_reads(rlskip: Any, tmp_path: Path) -> None:
    run = tmp_path / "exp_proj" / "GBS1_N1_in1_out1"
    numbers = [float("nan"), float("inf"), -float("inf"), 1.5]
    texts = ["half a \ud83d", "né \u2603", "\udc00\\", "\U0001f600"]
    rows = {"responses": torch.arange(4).reshape(4, 1), "rewards": torch.tensor(numbers)}
    more = {"more": [[x, {"x": x}] for x in numbers]}
    StepStore(run).save(1, {**rows, "text": texts, **more})
    out = tmp_path / "rows.jsonl"
    assert rlskip("export", run / "1", "--to", "jsonl", "--out", out).code == 0
    printed = rlskip("export", run / "1", "--to", "jsonl").out
    assert out.read_text(encoding="utf-8") == printed
    assert "né \u2603" in printed

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    read = [json.loads(line, parse_constant=refuse) for line in printed.splitlines()]
    assert [row["reward"] for row in read] == [None, None, None, 1.5]
    assert [row["more"][1]["x"] for row in read] == [None, None, None, 1.5]
    assert [row["text"] for row in read] == texts


@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("is_whole", [True, False])
def test_padded_copies_of_the_tokens_are_left_out(
    rlskip: Any, tmp_path: Path, is_whole: bool, is_alone: bool
) -> None:
    prompts, responses = torch.tensor([[0, 5], [6, 7]]), torch.tensor([[1, 2], [3, 0]])
    whole = torch.cat([prompts, responses], 1) + (not is_whole)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    columns = {"prompts": prompts, "responses": responses, "input_ids": whole,
               "attention_mask": mask, "rm_scores": torch.ones(2, 2)}  # fmt: skip
    if is_alone:
        del columns["prompts"], columns["responses"]
    StepStore(tmp_path / RUN).save(1, TensorDict(columns, 2))
    lines = rlskip("export", tmp_path / RUN, "--to", "jsonl").out.splitlines()
    left_out = is_whole or is_alone
    assert ["input_ids" not in json.loads(line) for line in lines] == [left_out] * 2
    rewards = [json.loads(line)["rm_scores"] for line in lines]
    assert is_alone or rewards == [[1.0, 1.0], [1.0]]


def test_single_values_of_a_batch_are_in_every_line(rlskip: Any, tmp_path: Path) -> None:
    batch = TensorDict({"responses": torch.ones(2, 1).long()}, [2])
    batch["source"] = NonTensorData("gsm8k", batch_size=[2])
    batch["tools"] = NonTensorData({"names": ["a"]}, batch_size=[2])
    StepStore(tmp_path / "e_p" / "s").save(1, batch)
    out = rlskip("export", 1, "-d", tmp_path, "--to", "jsonl").out
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["source"] for row in rows] == ["gsm8k", "gsm8k"]
    assert rows[1]["tools"] == {"names": ["a"]}


def test_chats(rlskip: Any, run: Path) -> None:
    first, second = map(json.loads, rlskip("export", run, "--to", "messages").out.splitlines())
    assert first == {
        "messages": [
            *ASKED,
            {"role": "assistant", "content": "there"},
            {"role": "assistant", "content": "yes"},
        ],
        "step": 3, "call": None, "group": "p", "session": 0, "reward": 1.0,
    }  # fmt: skip
    assert (second["session"], second["reward"]) == (1, None)


@pytest.mark.data
def test_hugging_face_and_pandas_open_parquet(rlskip: Any, run: Path, tmp_path: Path) -> None:
    import datasets
    import pandas as pd

    StepStore(run).save(4, TURNS[:1])
    out = tmp_path / "rows.parquet"
    assert rlskip("export", run, "--to", "parquet", "--out", out).code == 0
    expected = package.open(run).to_arrow().to_pylist()
    data = datasets.load_dataset(
        "parquet", data_files=str(out), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert data.to_list() == expected
    assert len(pd.read_parquet(out)) == len(expected) == 4


@pytest.mark.data
@pytest.mark.parametrize(
    ("first", "then", "kept"),
    [
        ([{"a": 1}], [{"b": [2]}], [{"a": 1, "b": None}, {"a": None, "b": [2]}]),
        ([[{"a": 1}]], [[{"a": 2, "b": "x"}]], [[{"a": 1, "b": None}], [{"a": 2, "b": "x"}]]),
        (np.float32([0.5]), np.array([0.1]), [0.5, 0.1]),
        ([1], ["007"], None),
        ([True], [2], None),
        ([0.5], [2**60 + 1], None),
    ],
)
def test_parquet_has_what_later_dumps_hold_or_refuses_it(
    rlskip: Any, tmp_path: Path, first: Any, then: Any, kept: list[Any] | None
) -> None:
    import pyarrow.parquet

    for step, own in enumerate((first, then), 1):
        StepStore(tmp_path / RUN).save(step, {"own": own})
    out = tmp_path / "rows.parquet"
    said = rlskip("export", tmp_path / RUN, "--to", "parquet", "--out", out)
    if kept is None:
        assert (said.code, "of other kinds" in said.err, out.exists()) == (2, True, False)
    else:
        assert pyarrow.parquet.read_table(out)["own"].to_pylist() == kept


@pytest.mark.data
def test_mappings_without_entries_are_null_in_parquet(
    rlskip: Any, run: Path, tmp_path: Path
) -> None:
    import pyarrow.parquet

    kwargs = [{}, {"create": {}}, {"create": {"a": 1}}]
    StepStore(run).save(4, [{**TURNS[0], "empty": {}, "kwargs": [one]} for one in kwargs[:2]])
    StepStore(run).save(5, [{**TURNS[0], "empty": {}, "kwargs": [kwargs[2]]}])
    out = tmp_path / "rows.parquet"
    assert rlskip("export", run, "--to", "parquet", "--out", out).code == 0
    table = pyarrow.parquet.read_table(out)
    assert table["empty"].null_count == len(table)
    assert table["kwargs"].to_pylist()[-1] == [kwargs[2]]


# -- tables and conversations ------------------------------------------------------------------


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
    StepStore(tmp_path / RUN).save(1, TensorDict(tensors, [rows]))
    run = rlskip.open(tmp_path / RUN)
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
    store = StepStore(tmp_path / RUN)
    store.save(1, TensorDict(columns, [2]))
    swapped = np.array([1.5, 2.5], ">f8")
    mixed: list[dict[str, Any]] = [
        {"mixed": 1, "text": "é\ud800", "uid": "a\ud800"},
        {"mixed": {"a": [1]}, "text": "b", "uid": "b"},
    ]
    store.save(2, [{**row, "swapped": n} for row, n in zip(mixed, swapped, strict=True)])
    store.save(3, {"swapped": swapped, "text": [1, 2]})
    run = rlskip.open(tmp_path / RUN)
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
    assert together["text"].to_pylist() == [None, None, "é\\ud800", "b"]
    assert together["group"].to_pylist()[2:] == ["a\\ud800", "b"]
    assert together["response"].to_pylist() == [[1, 2], [3, 4], None, None]


@pytest.mark.parametrize(
    ("seen", "completion", "mask", "log_probs"),
    [
        ([1, 2, 3, 9], [2, 3, 9, 4], [True, True, False, True], [-1.0, -2.0, None, -3.0]),
        ([7, 8], [2, 3, 4], [True] * 3, [-1.0, -2.0, -3.0]),  # its context was rewritten
    ],
)
def test_a_session_has_its_conversation_in_one_piece(
    tmp_path: Path, seen: list[int], completion: list[int], mask: list[bool], log_probs: list[Any]
) -> None:
    StepStore(tmp_path / RUN).save(1, [TURNS[0], {**TURNS[1], "prompt_ids": seen}, TURNS[2]])
    first, second = rlskip.open(tmp_path / RUN).sessions()
    assert first.conversation == Conversation([1], completion, mask, log_probs)
    assert (first.group, first.number, len(first.rows), first.reward) == ("p", 0, 2, 1.0)
    assert [one["role"] for one in first.messages or ()] == ["user", "assistant", "assistant"]
    assert (second.messages or ())[1] == {"role": "assistant", "content": "no"}
    assert second.reward is None


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
