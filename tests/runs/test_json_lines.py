"""Other programs' JSON lines as rows: verl's text, verifiers' traces, and what is neither."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from rlskip.format.dump_errors import DumpError
from rlskip.runs.json_lines import read_json_lines
from rlskip.runs.rollouts import Rollouts

ASKED = [{"role": "user", "content": "Hi"}]


def read(file: Path, *lines: Any) -> list[dict[str, Any]]:
    """The rows of a file of these lines."""
    text = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    file.write_text("\n".join(text), encoding="utf-8")
    steps = read_json_lines(file)
    return [row for step, columns in steps for row in Rollouts(columns, {"step": step})]


def test_text_of_verl(tmp_path: Path) -> None:
    lines = [
        {"input": prompt, "output": "yes", "gts": "no", "score": score, "step": 7, "acc": 0.5}
        for prompt, score in (("a", 1.0), ("b", 0.0), ("a", 0.5))
    ]
    rows = read(tmp_path / "7.jsonl", *lines)
    assert [(row["group"], row["session"], row["reward"]) for row in rows] == [
        ("0", 0, 1.0), ("1", 0, 0.0), ("0", 1, 0.5),
    ]  # fmt: skip
    assert {(row["step"], row["output"], row["acc"]) for row in rows} == {(7, "yes", 0.5)}


def node(parent: int | None, ids: list[int], **more: Any) -> dict[str, Any]:
    message = {"role": "assistant" if more else "user", "content": "a"}
    return {"parent": parent, "message": message, "token_ids": ids, **more}


def said(*log_probs: float) -> dict[str, Any]:
    return {"sampled": True, "mask": [True] * 2, "logprobs": log_probs}


def test_log_probs_stay_with_the_tokens_of_their_message(tmp_path: Path) -> None:
    asked = node(None, [1])
    every = [
        [asked, node(0, [2, 3], **said(0.0, 0.0))],
        [asked, node(0, [2, 3], **said())],
        [asked, node(0, [2, 3], **said()), node(1, [4]), node(2, [5, 6], **said(-3.0, -4.0))],
    ]
    lines = [{"traces": [{"nodes": nodes}]} for nodes in every]
    zero, none, mixed = read(tmp_path / "traces.jsonl", *lines)
    assert (zero["log_probs"], none["log_probs"]) == ([0.0, 0.0], None)
    assert mixed["mask"] == [1, 1, 0, 1, 1]
    assert str(mixed["log_probs"]) == "[nan, nan, 0.0, -3.0, -4.0]"
    assert (mixed["raw_prompt"], len(mixed["completions"])) == ([asked["message"]], 3)


def test_a_trace_of_several_branches_is_several_rows(tmp_path: Path) -> None:
    sampled = {"sampled": True, "mask": [False, True], "logprobs": [-1.0]}
    nodes = [node(None, [1], mask=[False]), *(node(0, [9, token], **sampled) for token in (5, 6))]
    rewards = {"a": {"score": 1.0, "weight": 0.5}, "b": {"score": 2.0}, "c": None}
    trace = {"nodes": nodes, "rewards": rewards, "metrics": {"m": 1}}
    episode = {"traces": [trace], "group": {"id": "p"}, "run": {"work": {"step": 3}}, "ok": True}
    rows = read(tmp_path / "traces.jsonl", episode)
    assert [(row["prompt"], row["response"]) for row in rows] == [([1, 9], [5]), ([1, 9], [6])]
    assert [(row["step"], row["group"], row["session"]) for row in rows] == [
        (3, "p", 0), (3, "p", 1),
    ]  # fmt: skip
    assert [row["reward"] for row in rows] == [2.5, 2.5]
    assert (rows[0]["trace"]["metrics"], rows[0]["episode"]["ok"]) == ({"m": 1}, True)


def test_older_results_of_verifiers(tmp_path: Path) -> None:
    result = {"example_id": 4, "prompt": ASKED, "completion": "no", "reward": 0.5, "answer": "yes"}
    (row,) = read(tmp_path / "results.jsonl", result)
    assert (row["group"], row["reward"], row["answer"]) == ("4", 0.5, "yes")
    assert (row["raw_prompt"], row["completions"]) == (ASKED, "no")


def branches(n: int) -> dict[str, Any]:
    """A trace of `n` messages, one after the other, and `n` that follow the last of them."""
    parents = [None, *range(n - 1), *[n - 1] * n]
    return {"traces": [{"nodes": [node(at, []) for at in parents]}]}


@pytest.mark.parametrize(
    ("name", "lines", "why"),
    [
        ("7.json", [], "no file of rollouts has this name"),
        ("7.jsonl", [{}, "{"], "line 2 is not JSON"),
        ("7.jsonl", ["[]"], "line 1 is not an object"),
        ("7.jsonl", ["[" * 100_000], "it cannot be read: RecursionError"),
        ("traces.jsonl", [{"traces": [{"nodes": [{}]}]}], "it cannot be read: KeyError"),
        ("traces.jsonl", [{"run": 1}], "it cannot be read: AttributeError"),
        ("traces.jsonl", [{"run": {"work": {"step": "x"}}}], "of step 'x', which is no number"),
        ("traces.jsonl", [{"traces": [{"nodes": [node(1, []), node(1, []), node(0, [])]}]}],
         "its own parent"),
        ("traces.jsonl", [{"traces": [{"nodes": [node(None, [2], **said(-1.0, -2.0))]}]}],
         "has 1 tokens, a mask of 2 with 2 sampled ones, and 2 log-probs"),
        ("traces.jsonl", [{"traces": [{"nodes": [node(None, [2, 3], **said(-1.0))]}]}],
         "has 2 tokens, a mask of 2 with 2 sampled ones, and 1 log-probs"),
        ("traces.jsonl", [branches(3000)], "more than 128 values for each byte"),
        ("7.jsonl", [{f"k{i}": 0} for i in range(20_000)], "more than 128 values for each byte"),
    ],
)  # fmt: skip
def test_any_other_file_is_refused_by_name(
    tmp_path: Path, name: str, lines: list[Any], why: str
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DumpError, match=why) as caught:
        read(tmp_path / name, *lines)
    assert caught.value.where == str(tmp_path / name)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000, "kB"
