"""What the commands print: help and version, counts of sessions, labels, narrow screens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import rlskip as package
from rlskip.store import StepStore

RUN = "grpo_tiny/GBS4_N2_in6_out8"
VERBS = ("doctor", "ls", "show", "verify", "prune", "diff", "import", "export", "report")


@pytest.fixture
def turns(tmp_path: Path) -> Path:
    """A run whose sessions have several rows, as train.py's: two groups of two sessions."""
    rows = [
        {
            "prompt": group,
            "session": session,
            "turn": turn,
            "input_ids": [9, group, *[5] * turn, 7],
            "response_mask": [0, 0, *[0] * turn, 1],
            "rewards": 1.0 if turn == 2 and group else 0.0,
        }
        for group in (0, 1)
        for session in (0, 1)
        for turn in (0, 1, 2)
    ]
    StepStore(tmp_path / "d" / "e_p" / "GBS2_N2_in3_out3").save(1, rows)
    return tmp_path / "d"


def test_help_without_arguments_is_complete(rlskip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    answer = rlskip()
    assert (answer.code, answer.err) == (0, "")
    lines = answer.out.splitlines()
    assert lines[0].startswith("Usage: rlskip ")
    assert [line.split()[0] for line in lines[lines.index("Commands:") + 1 :]] == list(VERBS)
    assert "..." not in answer.out.split("Commands:")[1]
    assert rlskip("-h").out == rlskip("--help").out == answer.out
    assert rlskip("--version").out == f"rlskip {package.__version__}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_usage_errors_name_the_help_of_the_command(rlskip: Any, verb: str) -> None:
    answer = rlskip(verb, "--nope")
    assert answer.code == 2
    assert f"(see `rlskip {verb} --help`)" in answer.err
    assert rlskip(verb, "-h").code == 0


def test_show_and_report_count_sessions_over_their_turns(
    rlskip: Any, turns: Path, tmp_path: Path
) -> None:
    (shown,) = rlskip("show", 1, "-d", turns, "--json").json
    assert (shown["rows"], shown["sessions"], shown["groups"]) == (12, 4, 2)
    assert (shown["mean_reward"], shown["mean_length"]) == (0.5, 3)
    first = shown["sample"][0]
    assert (first["index"], first["turns"], first["prompt"]) == (2, 3, [9, 0, 5, 5])
    page = tmp_path / "page.html"
    report = rlskip("report", turns, "--html", page, "--json").json
    assert (report["sessions_counted"], report["groups_counted"]) == (4, 2)
    assert "4 of 4 sessions; from 0 to 1, 0.5 on average" in page.read_text()
    assert "session 1, 3 turns, reward 1" in page.read_text()


def test_json_lines_keep_each_column_and_tell_groups(rlskip: Any, turns: Path) -> None:
    out = rlskip("export", 1, "-d", turns, "--to", "jsonl").out
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["prompt"] for row in rows] == [0] * 6 + [1] * 6
    assert rows[1]["rlskip_prompt"] == [9, 0, 5]
    assert rows[1]["input_ids"] == [9, 0, 5, 7]
    assert [row["uid"] for row in rows] == ["0"] * 6 + ["1"] * 6
    assert [(row["session"], row["turn"]) for row in rows] == [
        (session, turn) for _ in range(2) for session in range(2) for turn in range(3)
    ]


def test_runs_are_in_natural_order_and_other_folders_are_not_runs(rlskip: Any, dumps: Path) -> None:
    for name in ("lr10", "lr2"):
        shutil.copytree(dumps / "grpo_tiny", dumps / f"{name}_tiny")
    (dumps / "other" / "logs" / "12").mkdir(parents=True)
    (dumps / "other" / "logs" / "12" / "events.txt").touch()
    runs = [run["run"].split("/")[0] for run in rlskip("ls", dumps, "--json").json]
    assert runs == ["grpo-lr2_tiny", "grpo_tiny", "lr2_tiny", "lr10_tiny"]


def test_the_dumps_of_a_custom_role_are_a_run_of_their_own(rlskip: Any, dumps: Path) -> None:
    shutil.copytree(dumps / RUN / "1", dumps / RUN / "critic" / "1")
    shown = {run["run"]: run["steps"] for run in rlskip("ls", dumps, "--json").json}
    assert shown[f"{RUN}/critic"] == [1]
    assert shown[RUN] == [1, 2, 3]


def test_nothing_to_verify_is_not_a_success(rlskip: Any, tmp_path: Path) -> None:
    answer = rlskip("verify", "-d", tmp_path)
    assert answer.code == 2
    assert "there are no dumps to verify" in answer.err


def test_a_timeline_that_is_not_there_is_an_error(rlskip: Any, dumps: Path) -> None:
    answer = rlskip("report", dumps / RUN, "--timeline", "/nowhere")
    assert answer.code == 2
    assert "--timeline /nowhere: no such directory" in answer.err


def test_diff_labels_its_sides_and_survives_a_damaged_dump(
    rlskip: Any, dumps: Path, tmp_path: Path
) -> None:
    shutil.copytree(dumps / RUN, tmp_path / "copy" / RUN)
    data = bytearray((dumps / RUN / "2" / "gen_batch.dp").read_bytes())
    data[40] ^= 1
    (dumps / RUN / "2" / "gen_batch.dp").write_bytes(data)
    answer = rlskip("diff", dumps / RUN, tmp_path / "copy" / RUN, "--json")
    assert answer.code == 1
    assert answer.json["a"] == f"{RUN} in {dumps}"
    assert answer.json["b"] == f"{RUN} in {tmp_path / 'copy'}"
    assert [one["step"] for one in answer.json["unreadable"]] == [2]
    assert [one["step"] for one in answer.json["steps"]] == [1, 3]


def test_no_word_is_broken_on_a_narrow_screen(
    rlskip: Any, dumps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    for command in (("ls", dumps), ("ls", dumps / RUN), ("show", 1, "-d", dumps / RUN)):
        lines = rlskip(*command).out.splitlines()
        assert max(map(len, lines)) <= 60
        words = " ".join(lines).split()
        for word in ("rollout_log_probs",) if "show" in command else (RUN,):
            assert word in words, command
