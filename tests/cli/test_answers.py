"""What the commands print: help and version, counts of sessions, labels, narrow screens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import rlskip as package
from rlskip.store import StepStore

RUN = "grpo_tiny/GBS4_N2_in6_out8"
VERBS = (
    "doctor", "ls", "show", "verify", "prune", "compare", "export", "rescore", "report", "bundle",
)  # fmt: skip


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


def test_show_and_report_count_sessions_over_their_turns(
    rlskip: Any, turns: Path, tmp_path: Path
) -> None:
    (shown,) = rlskip("show", 1, "-d", turns, "--sessions", 4, "--json").json
    figures = shown["figures"]
    assert (shown["rows"], figures["sessions"], figures["groups"]) == (12, 4, 2)
    assert (figures["reward"], figures["length"]) == (0.5, 3)
    first = shown["sample"][0]
    assert (first["row"], first["turns"], first["prompt"]) == (2, 3, [9, 0, 5, 5])
    page = tmp_path / "page.html"
    report = rlskip("report", turns, "--html", page, "--json").json
    assert (report["sessions"], report["groups"], report["shown"]) == (4, 2, 4)


def test_runs_are_in_natural_order_and_other_folders_are_not_runs(rlskip: Any, dumps: Path) -> None:
    for name in ("lr10", "lr2"):
        shutil.copytree(dumps / "grpo_tiny", dumps / f"{name}_tiny")
    (dumps / "other" / "logs" / "12").mkdir(parents=True)
    (dumps / "other" / "logs" / "12" / "events.txt").touch()
    (dumps / "other" / "events" / "12").mkdir(parents=True)
    (dumps / "other" / "events" / "12" / "meta.json").write_text("{}")
    StepStore(dumps / ".hidden_tiny" / "s").save(1, [1])
    (dumps / "lr11_tiny" / "s" / ".work").mkdir(parents=True)
    runs = [run["run"].split("/")[0] for run in rlskip("ls", dumps, "--json").json]
    assert runs == ["grpo-lr2_tiny", "grpo_tiny", "lr2_tiny", "lr10_tiny", "lr11_tiny"]


def test_a_run_with_roles_is_named_by_its_directory(
    rlskip: Any, dumps: Path, tmp_path: Path
) -> None:
    root = tmp_path / "other" / "stages"
    for role in ("", "critic", "stages"):
        shutil.copytree(dumps / RUN / "1", root / RUN / role / "1")
    runs = [run["run"] for run in rlskip("ls", root, "--json").json]
    assert runs == [RUN, f"{RUN}/critic", f"{RUN}/stages"]
    for run in runs:
        (shown,) = rlskip("show", 1, "-d", root / run, "--json").json
        assert shown["directory"] == str(root / run / "1")
        assert len(rlskip("export", root / run, "--to", "jsonl").out.splitlines()) == 8
        assert rlskip("compare", root / run, root / RUN).code == 0
    page = tmp_path / "page.html"
    assert rlskip("report", root / RUN, "--html", page, "--json").json["steps"] == 1
    assert rlskip("show", 1, "-d", root).code == 2, "there are three"


def test_ls_limits_runs_and_dumps(rlskip: Any, dumps: Path) -> None:
    def runs(*more: object) -> list[str]:
        return [one["run"].split("_")[0] for one in rlskip("ls", dumps, "--json", *more).json]

    shutil.rmtree(dumps / RUN / "2")
    assert runs() == ["grpo-lr2", "grpo"]
    assert runs("--limit", 1) == ["grpo-lr2"]
    assert "1 more: a larger --limit lists them" in rlskip("ls", dumps, "--limit", 1).out
    assert rlskip("ls", dumps, "-d", "/nowhere").code == 0


def test_ls_reads_what_it_lists_and_some_of_a_long_run(
    rlskip: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import import_module

    from rlskip.store.dump import OpenDump

    store = StepStore(tmp_path / RUN)
    for step in range(1, 41):
        store.save(step, {"x": list(range(9 if step == 7 else 3))})
    (tmp_path / RUN / "dumps.index").unlink()  # from which it would read nothing else
    read: list[int] = []
    whole = OpenDump.read_meta

    def read_meta(self: OpenDump) -> Any:
        read.append(self.place.step)
        return whole(self)

    monkeypatch.setattr(OpenDump, "read_meta", read_meta)
    (run,) = rlskip("ls", tmp_path, "--steps", "--limit", 3, "--json").json
    assert [dump["step"] for dump in run["dumps"]] == read == [1, 2, 3]
    exact = rlskip("ls", tmp_path, "--json").json[0]
    monkeypatch.setattr(import_module("rlskip.cli.ls"), "_SAMPLED", 10)
    read.clear()
    (run,) = rlskip("ls", tmp_path, "--json").json
    assert (run["steps"], run["dumps"], run["read"]) == (exact["steps"], 40, len(read))
    assert len(read) < 15
    assert run["size"] == pytest.approx(exact["size"], rel=0.1)
    assert f"by {len(read)} of its dumps" in rlskip("ls", tmp_path).out
