"""Other programs' JSON lines as rows: verl's text, verifiers' traces, and what is neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rlskip as package
from rlskip.format.dump_errors import DumpError

ASKED = [{"role": "user", "content": "Hi"}]


def read(file: Path, *lines: Any) -> list[dict[str, Any]]:
    """The rows of a file of these lines."""
    text = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    file.write_text("\n".join(text), encoding="utf-8")
    return list(package.open(file).run.iter_rows())


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
    assert len(read(tmp_path / "7.jsonl", "\ufeff" + json.dumps(lines[0]))) == 1


def test_lines_of_two_programs_in_a_file(tmp_path: Path) -> None:
    said = [*ASKED, {"role": "assistant", "content": "a"}]
    rows = read(
        tmp_path / "a.jsonl", {"input": "Hi", "output": "b", "score": 1}, {"messages": said}
    )
    assert [(row["output"], row["completions"]) for row in rows] == [("b", None), (None, said[1:])]


def test_the_reward_of_trl_names_what_it_is_the_sum_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = {"step": 1, "prompt": "a", "completion": "b", "right": 1.0, "advantage": 0.5}
    assert [row["reward"] for row in read(tmp_path / "a.jsonl", line)] == [1.0]
    assert not caplog.messages
    assert [row["reward"] for row in read(tmp_path / "a.jsonl", {**line, "tokens": 9})] == [10.0]
    assert "the reward of each row is the sum of right, tokens" in caplog.text


def node(parent: int | None, ids: list[int], **more: Any) -> dict[str, Any]:
    message = {"role": "assistant" if more else "user", "content": "a"}
    return {"parent": parent, "message": message, "token_ids": ids, **more}


def said(*log_probs: float | None) -> dict[str, Any]:
    return {"sampled": True, "mask": [True] * 2, "logprobs": log_probs}


def test_log_probs_stay_with_the_tokens_of_their_message(tmp_path: Path) -> None:
    asked = node(None, [1])
    every = [
        [asked, node(0, [2, 3], **said(0.0, 0.0))],
        [asked, node(0, [2, 3], **said())],
        [asked, node(0, [2, 3], **said(None, -1.0))],
        [asked, node(0, [2, 3], **said()), node(1, [4]), node(2, [5, 6], **said(-3.0, -4.0))],
    ]
    lines = [{"traces": [{"nodes": nodes}]} for nodes in every]
    zero, none, some, mixed = read(tmp_path / "traces.jsonl", *lines)
    assert (zero["log_probs"], none["log_probs"]) == ([0.0, 0.0], None)
    assert str(some["log_probs"]) == "[nan, -1.0]"
    assert mixed["mask"] == [1, 1, 0, 1, 1]
    assert str(mixed["log_probs"]) == "[nan, nan, 0.0, -3.0, -4.0]"
    assert (mixed["raw_prompt"], len(mixed["completions"])) == ([asked["message"]], 3)


def test_a_trace_of_several_branches_is_several_rows(tmp_path: Path) -> None:
    sampled = {"sampled": True, "mask": [0, 2], "logprobs": [-1.0]}  # any number but 0
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


@pytest.mark.parametrize(
    ("name", "lines", "why"),
    [
        ("7.jsonl", [{"question": "a"}], "its fields are those of no known program: question"),
        ("traces.jsonl", [{"prompt": "a"}], "its fields are those of no known program: prompt"),
        ("7.jsonl", [{"input": "", "output": ""}, "{"], "line 2 cannot be read: JSONDecodeError"),
        ("7.jsonl", ["[]"], "line 1: it is a list, not a mapping"),
        ("traces.jsonl", [{"traces": [{"nodes": [{}]}]}], "line 1 cannot be read: KeyError"),
        ("traces.jsonl", [{"traces": [{"nodes": [node(1, []), node(1, []), node(0, [])]}]}],
         "its own parent"),
        *(("traces.jsonl", [{"traces": [{"nodes": [node(None, []), *lost]}]}], "one that is not")
          for lost in ([node(2, []), node(1, [])], [node(-2, [])], [node(9, [])])),
        ("traces.jsonl", [{"traces": [{"nodes": [node(None, [2, 3], **said(-1.0))]}]}],
         "has 2 tokens, a mask of 2 .2 sampled. and 1 log-prob$"),
        ("traces.jsonl", [{"traces": [{"rewards": {"a": {"score": None}}}]}], "line 1 cannot be"),
        ("a.jsonl", [{"messages": []}, {"input": ""}], "line 2: its fields are those of no known"),
        ("7.jsonl", [{"input": "", "output": ""}, {"input": ""}], "line 2: its fields are those"),
        *(("a.jsonl", [{"messages": [], "step": step}], "line 1: its step .*not a whole number")
          for step in (-1, 7.5, True, "x")),
    ],
)  # fmt: skip
def test_any_other_file_is_refused_by_name(
    tmp_path: Path, name: str, lines: list[Any], why: str
) -> None:
    with pytest.raises(DumpError, match=why) as caught:
        read(tmp_path / name, *lines)
    assert caught.value.where == str(tmp_path / name)


PROGRAMS: dict[str, tuple[str, list[Any]]] = {
    "verl": ("text/4.jsonl", [
        {"input": "a", "output": "yes", "score": 1.0, "step": 4},
        {"input": "a", "output": "no", "score": 0.0, "step": 4},
    ]),
    "prime-rl": ("out/traces.jsonl", [
        {"run": {"work": {"step": 4}}, "group": {"id": "g"},
         "traces": [{"nodes": [node(None, [1]), node(0, [2, 3], **said(-1.0, -2.0))],
                     "rewards": {"right": {"score": score}}}]}
        for score in (1.0, 0.0)
    ]),
    "messages": ("chats.jsonl", [
        {"messages": [*ASKED, {"role": "assistant", "content": text}], "reward": reward, "step": 4}
        for text, reward in (("yes", 1.0), ("no", 0.0))
    ]),
    "TRL": ("completions/completions_00004.parquet", [
        {"step": 4, "prompt": "a", "completion": text, "right": reward, "advantage": 0.7}
        for text, reward in (("yes", 1.0), ("no", 0.0))
    ]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "whole"), [*((kind, "directory") for kind in PROGRAMS), ("verl", "file")]
)
def test_files_of_other_programs_are_opened_shown_and_scored(
    rlskip: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, kind: str, whole: str,
) -> None:  # fmt: skip
    name, lines = PROGRAMS[kind]
    file = tmp_path / "theirs" / name
    file.parent.mkdir(parents=True)
    if kind == "TRL":
        pa, pq = (pytest.importorskip(f"pyarrow{end}") for end in ("", ".parquet"))
        pq.write_table(pa.Table.from_pylist(lines), file)
    else:
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    where = file if whole == "file" else file.parent
    before = sorted(tmp_path.rglob("*"))
    run = package.open(where).run
    assert run.steps() == [4]
    (group,) = run[4].groups()
    assert [one.reward for one in group.sessions] == [1.0, 0.0]
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written beside them"
    page = rlskip("report", where, "--html", tmp_path / "page.html", "--json")
    assert (page.code, page.json["shown"]) == (0, 2), page.err
    (tmp_path / "judges_of_files.py").write_text(
        "def judge(completions, **more):\n    return [float(len(str(c))) for c in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    scored = rlskip("rescore", where, "--reward", "judges_of_files:judge", "--json")
    assert (scored.code, scored.json["sessions"]) == (0, 2), scored.err
    same = rlskip("compare", where, where)
    assert (same.code, "cannot be listed" in same.err + caplog.text) == (0, False)


def test_a_file_of_no_known_program_is_named(rlskip: Any, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    said = rlskip("report", tmp_path, "--html", tmp_path / "page.html")
    assert (said.code, "no known program: question, answer" in said.err) == (2, True)
    (tmp_path / "a.jsonl.gz").write_bytes(b"")
    packed = rlskip("report", tmp_path / "a.jsonl.gz", "--html", tmp_path / "page.html")
    assert (packed.code, "it is not a file of rollouts" in packed.err) == (2, True)
    assert "rlskip.write" in said.err
