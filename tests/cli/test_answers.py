"""What the commands print: help, counts of sessions, labels; bad input is one line and code 2."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rlskip as package
from rlskip.store import StepStore

RUN = "grpo_tiny/GBS4_N2_in6_out8"
VERBS = (
    "doctor", "ls", "show", "verify", "prune", "compare", "export", "rescore", "report", "bundle",
)  # fmt: skip


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


def test_show_and_report_count_sessions_over_their_turns(rlskip: Any, tmp_path: Path) -> None:
    """As train.py's sessions, which have several rows: two groups of two."""
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
    turns = tmp_path / "d"
    StepStore(turns / "e_p" / "GBS2_N2_in3_out3").save(1, rows)
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
    (tmp_path / "empty").mkdir()
    assert rlskip("ls", tmp_path / "empty", "--steps").out.startswith("no dumps in ")


# -- bad input, and how a command ends -----------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ls", "/nowhere"], "no such file or directory"),
        (["show", "9", "-d", "{run}"], "this step has no dump; its steps are 1-3"),
        (["show", "1", "-d", "{dumps}"], "2 runs have dumps here; name one: /"),
        (["compare", "{dumps}", "{dumps}"], "2 runs have dumps here; name one: /"),
        (["show", "{dumps}/nothing"], "no such file"),
        (["show", "~nobody-is-called-so/3"], "~nobody-is-called-so/3: no such file"),
        (["compare", "~nobody-is-called-so", "{dumps}"], "~nobody-is-called-so: no such file"),
        (["prune", "{dumps}"], "no limit is given"),
        (["prune", "", "--keep-last", "1"], "is a shell variable unset?"),
        (["prune", "{dumps}", "-d", "{run}", "--keep-last", "1"], "is given, too; name one"),
        (["rescore", "{run}/1", "--reward", "judge:f", "--steps", "2"], "none of the steps 2; its"),
        (["report", "{run}/1"], "no runs have dumps here; name a dump_dir or a run in it"),
        (["prune", "{dumps}", "--older-than", "soon"], "'soon' is not an age"),
        (["export", "{run}", "--to", "verl"], "is not a format; give jsonl, messages or parquet; "),
        (["export", "{run}", "--to", "parquet"], "--out: it is missing; give a file"),
        (["export", "{journals}", "--to", "jsonl"], "there are no dumps to export"),
        (["show", "x" * 256], "File name too long; shorten it"),
        (["import", "{dumps}"], "No such command"),
        (["show"], "Missing argument"),
        (["show", "1", "--sessions", "many"], "--sessions"),
        (["ls", "--no-such-option"], "No such option"),
        (["verify", "-d", "{empty}"], "there are no dumps to verify"),
        (["report", "{run}", "--html", "{empty}/page", "--max-mb", "0.1"], "--max-mb"),
        (["report", "{run}", "--html", "{empty}"], "it is a directory"),
        (["report", "{run}", "--html", ""], "it is a directory"),
        (["report", "{run}", "--max-mb", "inf"], "--max-mb"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    rlskip: Any, dumps: Path, run_dir: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    (empty := tmp_path / "empty").mkdir()
    (journals := tmp_path / "journals" / run_dir.parent.name / run_dir.name).mkdir(parents=True)
    (journals / "1.journal").touch()
    places = {"run": run_dir, "dumps": dumps, "empty": empty, "journals": journals}
    said = rlskip(*(a.format(**places) for a in arguments))
    assert said.code == 2
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("rlskip: ")
    assert words in line
    assert list(tmp_path.glob("empty*")) == [empty], "nothing half written is left"


def test_ctrl_c_ends_a_command_without_a_traceback(
    rlskip: Any, dumps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(place: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlskip.cli.ls.find_runs", stop)
    said = rlskip("ls", dumps)
    assert (said.code, said.out, said.err) == (130, "", "")


def test_the_installed_command_ends_quietly_when_its_reader_does(dumps: Path) -> None:
    command = f"{sys.executable} -m rlskip.cli.main ls --steps {dumps} --json | true"
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, env=env
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_a_terminal_may_lack_the_characters_of_rollouts(tmp_path: Path) -> None:
    StepStore(tmp_path / "e_p" / "GBS1_N1_in1_out1").save(1, {"text": ["é中😀"]})
    run = [sys.executable, "-m", "rlskip.cli.main", "show", "1", "-d", "."]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(run, capture_output=True, env=env, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"\xe9\u4e2d\U0001f600" in done.stdout
