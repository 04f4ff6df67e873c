"""Samples of other programs in and sessions out: verl's text, verifiers' traces, chats, tables."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlskip as package
from rlskip.store import StepStore
from tests.interop.conftest import RUN

ASKED = [{"role": "user", "content": "Hi"}]
TURNS = [
    {"uid": "p", "session_id": 0, "turn": 0, "prompt_ids": [1], "completion_ids": [2, 3],
     "logprobs": [-1.0, -2.0], "reward": 0.0, "raw_prompt": ASKED, "completions": "there"},
    {"uid": "p", "session_id": 0, "turn": 1, "prompt_ids": [1, 2, 3, 9], "completion_ids": [4],
     "logprobs": [-3.0], "reward": 1.0, "raw_prompt": [], "completions": "yes"},
    {"uid": "p", "session_id": 1, "turn": 0, "prompt_ids": [1], "completion_ids": [5],
     "logprobs": [-4.0], "reward": None, "raw_prompt": ASKED, "completions": "no"},
]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    StepStore(tmp_path / "dumps" / RUN).save(3, TURNS)
    return tmp_path / "dumps" / RUN


def test_text_of_verl_goes_out_and_in(
    rlskip: Any, run: Path, tmp_path: Path, imported: Any
) -> None:
    assert rlskip("export", run, "--to", "verl-text", "--out", tmp_path / "text").code == 0
    lines = (tmp_path / "text" / "3.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {
        "input": "Hi", "output": "there\nyes", "gts": None, "score": 1.0, "step": 3,
        "request_id": "3-p-0",
    }  # fmt: skip
    first, second = imported(tmp_path / "text")
    assert (first["step"], first["reward"], first["output"]) == (3, 1.0, "there\nyes")
    assert (first["group"], second["group"], second["session"]) == ("0", "0", 1)
    again = rlskip("import", tmp_path / "text", "-d", tmp_path / "in", "--run", RUN)
    assert "exists already" in again.out
    (tmp_path / "text" / "4.jsonl").write_text("{")
    bad = rlskip("import", tmp_path / "text", "-d", tmp_path / "in", "--run", RUN)
    assert (bad.code, "line 1 is not JSON" in bad.err) == (2, True)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"content": None, "tool_calls": [{"name": "f", "é": None}]}, '[{"name": "f", "é": null}]'),
        ({"content": None}, ""),
        ({"content": [{"type": "text", "text": "no"}]}, '[{"type": "text", "text": "no"}]'),
        ({"content": "no", "tool_calls": ["f"]}, "no"),
    ],
)
def test_a_message_without_text_is_what_it_calls(
    rlskip: Any, run: Path, tmp_path: Path, said: dict[str, Any], text: str
) -> None:
    tool = {"role": "tool", "content": "42"}
    rows = [{"raw_prompt": ASKED, "completions": [{"role": "assistant", **said}, tool]}]
    StepStore(run).save(4, rows)
    assert rlskip("export", run, "--to", "verl-text", "--out", tmp_path / "text").code == 0
    (line,) = map(json.loads, (tmp_path / "text" / "4.jsonl").read_text("utf-8").splitlines())
    assert (line["input"], line["output"]) == ("Hi", f"{text}\n42")
    assert rlskip("export", "4", "-d", run, "--to", "atif", "--out", tmp_path / "atif").code == 0
    (file,) = (tmp_path / "atif").iterdir()
    assert [one["message"] for one in json.loads(file.read_text())["steps"]] == ["Hi", text, "42"]


def test_traces_of_verifiers_go_out_and_in(
    rlskip: Any, run: Path, tmp_path: Path, imported: Any
) -> None:
    assert rlskip("export", run, "--to", "verifiers", "--out", tmp_path / "traces.jsonl").code == 0
    first, second = imported(tmp_path / "traces.jsonl")
    assert (first["step"], first["group"], first["session"]) == (3, "p", 0)
    assert (first["prompt"], first["response"]) == ([1], [2, 3, 9, 4])
    assert (first["mask"], first["log_probs"]) == ([1, 1, 0, 1], [-1.0, -2.0, 0.0, -3.0])
    assert (first["reward"], second["reward"]) == (1.0, None)
    assert first["raw_prompt"] == ASKED
    assert second["completions"] == [{"role": "assistant", "content": "no"}]


def test_groups_of_several_calls_stay_apart_in_traces(
    rlskip: Any, tmp_path: Path, imported: Any
) -> None:
    store = StepStore(tmp_path / "dumps" / RUN)
    for call in (None, 1):
        rows = [{"prompt_ids": [1], "completion_ids": [2, i]} for i in range(2)]
        store.save(3, rows, part=call)
    out = tmp_path / "traces.jsonl"
    assert rlskip("export", tmp_path / "dumps" / RUN, "--to", "verifiers", "--out", out).code == 0
    assert [row["group"] for row in imported(out)] == ["0-0", "0-0", "1-0", "1-0"]
    said = rlskip("compare", tmp_path / "dumps", tmp_path / "in")
    assert "no difference" in said.out


def _chat(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(roles)]


#: Messages of a row's response, its mask, and the tokens of each message.
TOOLS: dict[str, tuple[list[str], list[int], list[list[int]]]] = {
    "a tool": (["assistant", "tool", "assistant"], [1, 1, 0, 1], [[0, 1], [2], [3]]),
    "two tools": (["assistant", "tool", "tool", "assistant"], [1, 0, 0, 1], [[0], [], [1, 2], [3]]),
    "a template": (["assistant", "tool", "assistant"], [0, 1, 0, 1], [[0, 1], [2], [3]]),
    "a tool at the end": (["assistant", "tool"], [1, 1, 0], [[0, 1], [2]]),
    "no message of the tool": (["assistant", "assistant"], [1, 0, 1], [[0], [1, 2]]),
    "two answers in a row": (["assistant", "assistant", "tool", "assistant"], [1, 0, 1],
                             [[], [0], [1], [2]]),
    "one text of all": (["assistant"], [1, 0, 1], [[0, 1, 2]]),
    "nothing sampled": (["assistant", "tool"], [0, 0], [[0, 1], []]),
}  # fmt: skip


@pytest.mark.parametrize("name", TOOLS)
def test_each_message_goes_out_with_its_own_tokens(
    rlskip: Any, tmp_path: Path, imported: Any, name: str
) -> None:
    roles, mask, numbers = TOOLS[name]
    prompt, answers = _chat("system", "user", "assistant", "user"), _chat(*roles)
    ids = [100 + i for i in range(len(mask))]
    row = {"uid": "p", "prompt_ids": [1, 2], "completion_ids": ids, "completion_mask": mask,
           "logprobs": [-float(i) * flag for i, flag in enumerate(mask)],
           "raw_prompt": prompt, "completions": answers}  # fmt: skip
    StepStore(tmp_path / "dumps" / RUN).save(3, [row])
    out, where = tmp_path / "traces.jsonl", tmp_path / "dumps" / RUN
    assert rlskip("export", where, "--to", "verifiers", "--out", out).code == 0
    nodes = json.loads(out.read_text())["traces"][0]["nodes"]
    assert [node["message"] for node in nodes] == prompt + answers
    assert [node["parent"] for node in nodes] == [None, *range(len(nodes) - 1)]
    tokens = [node.get("token_ids", []) for node in nodes]
    assert tokens == [[], [], [], [1, 2], *([ids[i] for i in some] for some in numbers)]
    assert [node["sampled"] for node in nodes] == [*[False] * 4, *(r == "assistant" for r in roles)]
    for node in nodes:
        assert len(node.get("logprobs", [])) == sum(node.get("mask", [])), "as verifiers asks"
    (again,) = imported(out)
    if 1 in mask:
        first = mask.index(1)
        assert (again["prompt"], again["response"]) == ([1, 2, *ids[:first]], ids[first:])
        assert (again["mask"], again["log_probs"]) == (mask[first:], row["logprobs"][first:])
    assert (again["raw_prompt"], again["completions"]) == (prompt, answers)
    assert rlskip("export", where, "--to", "atif", "--out", tmp_path / "atif").code == 0
    (file,) = (tmp_path / "atif").iterdir()
    for step, some in zip(json.loads(file.read_text())["steps"][4:], numbers, strict=True):
        metrics = step.get("metrics")
        assert bool(metrics) == (step["source"] == "agent" and any(mask[i] for i in some))
        if metrics:
            said = some[[mask[i] for i in some].index(1) :]
            assert metrics["completion_token_ids"] == [ids[i] for i in said]
            assert metrics["prompt_token_ids"] == [1, 2, *ids[: said[0]]]
            assert metrics["logprobs"] == [row["logprobs"][i] for i in said]


def test_what_a_later_prompt_recorded_goes_out_with_its_tokens(rlskip: Any, tmp_path: Path) -> None:
    tool = {"role": "tool", "content": "42"}
    chat = [*ASKED, {"role": "assistant", "content": "there"}, tool]
    StepStore(tmp_path / RUN).save(3, [TURNS[0], {**TURNS[1], "raw_prompt": chat}])
    episode = json.loads(rlskip("export", tmp_path / RUN, "--to", "verifiers").out)
    nodes = episode["traces"][0]["nodes"]
    assert [node["message"]["content"] for node in nodes] == ["Hi", "there", "42", "yes"]
    assert [node["token_ids"] for node in nodes] == [[1], [2, 3], [9], [4]]
    assert rlskip("export", tmp_path / RUN, "--to", "atif", "--out", tmp_path / "atif").code == 0
    steps = json.loads((tmp_path / "atif" / "3-p-0.json").read_text())["steps"]
    assert [step["message"] for step in steps] == ["Hi", "there", "42", "yes"]
    assert steps[3]["metrics"]["prompt_token_ids"] == [1, 2, 3, 9]


def test_log_probs_stay_with_the_tokens_of_their_message(imported: Any, tmp_path: Path) -> None:
    def node(parent: int | None, ids: list[int], **more: Any) -> dict[str, Any]:
        message = {"role": "assistant" if more else "user", "content": "a"}
        return {"parent": parent, "message": message, "token_ids": ids, **more}

    def said(*log_probs: float) -> dict[str, Any]:
        return {"sampled": True, "mask": [True] * 2, "logprobs": log_probs}

    asked = node(None, [1])
    every = [
        [asked, node(0, [2, 3], **said(0.0, 0.0))],
        [asked, node(0, [2, 3], **said())],
        [asked, node(0, [2, 3], **said()), node(1, [4]), node(2, [5, 6], **said(-3.0, -4.0))],
    ]
    lines = [json.dumps({"traces": [{"nodes": nodes}]}) + "\n" for nodes in every]
    (tmp_path / "traces.jsonl").write_text("".join(lines))
    zero, none, mixed = imported(tmp_path / "traces.jsonl")
    assert (zero["log_probs"], none["log_probs"]) == ([0.0, 0.0], None)
    assert mixed["mask"] == [1, 1, 0, 1, 1]
    assert str(mixed["log_probs"]) == "[nan, nan, 0.0, -3.0, -4.0]"


def test_a_trace_of_several_branches_is_several_rows(imported: Any, tmp_path: Path) -> None:
    message = {"role": "user", "content": "a"}
    nodes = [
        {"parent": None, "message": message, "token_ids": [1], "mask": [False]},
        *(
            {"parent": 0, "message": message, "sampled": True, "token_ids": [9, token],
             "mask": [False, True], "logprobs": [-1.0]}
            for token in (5, 6)
        ),
    ]  # fmt: skip
    rewards = {"a": {"score": 1.0, "weight": 0.5}, "b": {"score": 2.0}, "c": None}
    trace = {"nodes": nodes, "rewards": rewards, "metrics": {"m": 1}}
    (tmp_path / "traces.jsonl").write_text(json.dumps({"traces": [trace], "task": {}}) + "\n")
    rows = imported(tmp_path / "traces.jsonl")
    assert [(row["prompt"], row["response"]) for row in rows] == [([1, 9], [5]), ([1, 9], [6])]
    assert [row["reward"] for row in rows] == [2.5, 2.5]
    assert rows[0]["trace"]["metrics"] == {"m": 1}


def test_older_results_of_verifiers_are_read(imported: Any, tmp_path: Path) -> None:
    result = {"example_id": 4, "prompt": ASKED, "completion": "no", "reward": 0.5, "answer": "yes"}
    (tmp_path / "results.jsonl").write_text(json.dumps(result) + "\n")
    (row,) = imported(tmp_path / "results.jsonl")
    assert (row["group"], row["reward"], row["answer"]) == ("4", 0.5, "yes")
    assert (row["raw_prompt"], row["completions"]) == (ASKED, "no")


def test_chats_and_trajectories(rlskip: Any, run: Path, tmp_path: Path) -> None:
    said = rlskip("export", run, "--to", "messages").out.splitlines()
    first = json.loads(said[0])
    assert (first["reward"], first["step"], first["group"]) == (1.0, 3, "p")
    assert first["messages"] == [
        *ASKED, {"role": "assistant", "content": "there"}, {"role": "assistant", "content": "yes"},
    ]  # fmt: skip
    assert rlskip("export", run, "--to", "atif", "--out", tmp_path / "atif").code == 0
    files = sorted((tmp_path / "atif").iterdir())
    assert [file.name for file in files] == ["3-p-0.json", "3-p-1.json"]
    trajectory = json.loads(files[0].read_text())
    assert trajectory["schema_version"] == "ATIF-v1.4"
    assert [(step["step_id"], step["source"]) for step in trajectory["steps"]] == [
        (1, "user"), (2, "agent"), (3, "agent"),
    ]  # fmt: skip
    assert trajectory["steps"][1]["metrics"]["completion_token_ids"] == [2, 3]
    again = rlskip("export", run, "--to", "atif", "--out", tmp_path / "atif")
    assert (again.code, "exists already" in again.err) == (2, True)
    for rank in range(2):
        StepStore(run, rank=rank, world_size=2).save(4, TURNS)
    assert rlskip("export", "4", "-d", run, "--to", "atif", "--out", tmp_path / "ranks").code == 0
    names = sorted(file.name for file in (tmp_path / "ranks").iterdir())
    assert names == [f"4-r{rank}-p-{session}.json" for rank in (0, 1) for session in (0, 1)]


def test_tokens_alone_are_no_chat(rlskip: Any, run_dir: Path, tmp_path: Path) -> None:
    said = rlskip("export", run_dir, "--to", "messages")
    assert (said.code, "--tokenizer" in said.err) == (2, True)
    for to in ("messages", "verl-text", "atif"):
        assert rlskip("export", run_dir, "--to", to, "--out", tmp_path / to).code == 2
        assert not [path for path in tmp_path.glob(f"{to}/**/*") if path.is_file()]
    unknown = rlskip("export", run_dir, "--to", "nothing")
    assert (unknown.code, "parquet" in unknown.err) == (2, True)


@pytest.mark.data
@pytest.mark.parametrize("by", ["turn", "session"])
def test_hugging_face_and_pandas_open_parquet(
    rlskip: Any, run: Path, tmp_path: Path, by: Any
) -> None:
    import datasets
    import pandas as pd

    StepStore(run).save(4, TURNS[:1])
    out = tmp_path / "rows.parquet"
    assert rlskip("export", run, "--to", "parquet", "--by", by, "--out", out).code == 0
    expected = package.open(run).to_arrow(by=by).to_pylist()
    data = datasets.load_dataset(
        "parquet", data_files=str(out), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert data.to_list() == expected
    assert len(pd.read_parquet(out)) == len(expected) == (4 if by == "turn" else 3)
    # Later steps have other columns: one more, one less, one that held nothing before.
    StepStore(run).save(5, [{**TURNS[0], "more": 1, "raw_prompt": [], "reward": None}])
    StepStore(run).save(6, [{name: TURNS[1][name] for name in ("uid", "completion_ids")}])
    out.unlink()
    assert rlskip("export", run, "--to", "parquet", "--by", by, "--out", out).code == 0
    expected = package.open(run).to_arrow(by=by).to_pylist()
    assert pd.read_parquet(out).more.dropna().tolist() == [1]
    found = datasets.load_dataset(
        "parquet", data_files=str(out), split="train", cache_dir=str(tmp_path / "again")
    )
    assert found.to_list() == [{name: row[name] for name in found.column_names} for row in expected]
    StepStore(run).save(7, [{**TURNS[0], "more": "text"}])
    out.unlink()
    said = rlskip("export", run, "--to", "parquet", "--by", by, "--out", out)
    assert (said.code, "step 7" in said.err) == (2, True)
    assert not out.exists()


@pytest.mark.data
@pytest.mark.parametrize(
    ("first", "then", "kept"),
    [
        ([{"a": 1}], [{"b": [2]}], [{"a": 1, "b": None}, {"a": None, "b": [2]}]),
        ([[{"a": 1}]], [[{"a": 2, "b": "x"}]], [[{"a": 1, "b": None}], [{"a": 2, "b": "x"}]]),
        (np.float32([0.5]), np.array([0.1]), [0.5, 0.1]),
        ([[1]], [[0.5]], [[1.0], [0.5]]),
        ([1], ["007"], None),
        (["07"], [7], None),
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
        assert (said.code, "step 2" in said.err, out.exists()) == (2, True, False)
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


@pytest.mark.data
def test_verifiers_own_reader_opens_the_traces(rlskip: Any, run: Path, tmp_path: Path) -> None:
    python = os.environ.get("RLSKIP_VERIFIERS", "")
    if not Path(python).is_file():
        pytest.skip(f"RLSKIP_VERIFIERS names no python with verifiers: {python!r}")
    rlskip("export", run, "--to", "verifiers", "--out", tmp_path / "traces.jsonl")
    code = """
import sys
from pathlib import Path
from verifiers.v1.configs.agent import WireAgentConfig
from verifiers.v1.state import State
from verifiers.v1.task import WireTaskData
from verifiers.v1.trace import Trace
from verifiers.v1.utils.trace_store import read_episodes
found = read_episodes(Path(sys.argv[1]), Trace[WireTaskData, State, WireAgentConfig])
first, second = (one.traces[0] for one in found)
print(first.reward, first.branches[0].token_ids, found[0].group.id, found[0].run.work.step)
"""
    done = subprocess.run(
        [python, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "1.0 [1, 2, 3, 9, 4] p 3", done.stderr
