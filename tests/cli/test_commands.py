"""Every command: bad input is one line and exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlskip.store import StepStore


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ls", "/nowhere"], "no such directory"),
        (["show", "9", "-d", "{run}"], "this step has no dump; its steps are 1-3"),
        (["show", "1", "-d", "{dumps}"], "2 runs have dumps here; name one: /"),
        (["compare", "{dumps}", "{dumps}"], "2 runs have dumps here; name one: /"),
        (["show", "{dumps}/nothing"], "no such file"),
        (["prune", "{dumps}"], "no limit is given"),
        (["prune", "{dumps}", "--older-than", "soon"], "'soon' is not an age"),
        (["export", "{run}", "--to", "verl"], "is not a format; give jsonl, messages or parquet; "),
        (["export", "{run}", "--to", "parquet"], "--out: it is missing; give a file"),
        (["export", "{journals}", "--to", "jsonl"], "there are no dumps to export"),
        (["import", "{dumps}"], "No such command"),
        (["show"], "Missing argument"),
        (["show", "1", "--sessions", "many"], "--sessions"),
        (["ls", "--no-such-option"], "No such option"),
        (["doctor", "--ray"], "No such option"),
        (["report", "--follow"], "No such option"),
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
