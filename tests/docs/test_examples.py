"""Programs, examples and tours of pages run as they are printed, and make what the pages say."""

from __future__ import annotations

import doctest
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rlskip

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


# -- docs/compare.md: its golden run -----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_golden_run_fails_by_stage(
    tmp_path: Path, python: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its programs run in a Python that has imported torch, and its test in this one."""
    small = ("data.train_batch_size=4", "actor_rollout_ref.rollout.n=4")
    page = (DOCS / "compare.md").read_text(encoding="utf-8")
    section = page.partition("## In CI: a golden run")[2]
    shell = re.search(r"((?:^    .*\n)+)", section, re.MULTILINE)
    test = re.search(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert shell is not None
    assert test is not None
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    source = (ROOT / "train.py").read_text(encoding="utf-8")
    (tmp_path / "train.py").write_text(source)
    monkeypatch.chdir(tmp_path)

    def run(command: list[str], check: bool) -> None:
        done = python.run(*command[1:], *small)
        assert done.returncode == 0, done.stdout + done.stderr

    record, add = shell[1].replace("\\\n", "").splitlines()
    assert add.split() == ["git", "add", "golden"]
    run(shlex.split(record), check=True)
    recorded = [file for file in tmp_path.glob("golden/**/*") if file.is_file()]
    assert sum(file.stat().st_size for file in recorded) < 1_000_000, "small enough to commit"
    names: dict[str, Any] = {}
    exec(compile(test[1], "test_golden.py", "exec"), names)
    names["subprocess"] = SimpleNamespace(run=run)
    (tmp_path / "same").mkdir()
    names["test_training_is_what_it_was"](tmp_path / "same")
    planted = source.replace("earned.std(1, keepdim=True)", "earned.std(0, keepdim=True)")
    assert planted != source
    (tmp_path / "train.py").write_text(planted)
    (tmp_path / "other").mkdir()
    with pytest.raises(AssertionError, match="advantages differs first, at step 1"):
        names["test_training_is_what_it_was"](tmp_path / "other")


# -- docs/open.md ------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [False, pytest.param(True, marks=pytest.mark.data)])
def test_the_examples_do_what_they_say(
    extra: bool, dumps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(dumps.parent)
    page = (DOCS / "open.md").read_text(encoding="utf-8")
    if not extra:
        page = page.partition("<!-- needs: data -->")[0]
    blocks = re.findall(r"^```pycon\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) > 4
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "open.md", "open.md", 0)
    said: list[str] = []
    doctest.DocTestRunner().run(test, out=said.append)
    if said:
        pytest.fail("".join(said))


# -- docs/recipes.md: in order, in one namespace -----------------------------------------------


# Two groups of two sessions; of the first one's, one is right.
PROMPTS = {0: ("What is 2+2?", [1, 2]), 1: ("What is 3+3?", [1, 3])}
SAMPLES = [
    {"group_index": group, "prompt": text, "response": f"said {k}", "tokens": [*ids, 10 + k, 20],
     "response_length": 2, "loss_mask": [1, 1], "rollout_log_probs": [-0.5, -1.0 - k],
     "reward": float(group or k)}
    for group, (text, ids) in PROMPTS.items() for k in range(2)
]  # fmt: skip


class Tokenizer:
    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page's programs leave in their namespace, and in this folder."""
    monkeypatch.chdir(tmp_path)
    torch.save({"rollout_id": 7, "samples": SAMPLES}, "rollout_7.pt")
    made: dict[str, Any] = {"tokenizer": Tokenizer()}
    page = (DOCS / "recipes.md").read_text(encoding="utf-8").partition("<!-- needs: verl -->")[0]
    for block in re.findall(r"(?ms)^```python\n(.*?)^```", page):
        exec(compile(block, "recipes.md", "exec"), made)
    return made


def test_the_recipes_make_what_they_say(names: dict[str, Any]) -> None:
    assert names["rollouts"]["completion_ids"] == [[10, 20], [11, 20]]
    assert names["useful"] == [(1, 2)]
    assert [row["reward"] for row in names["rows"]] == [0.25] * 4
    first, second, *_ = map(json.loads, Path("text/7.jsonl").read_text().splitlines())
    assert first == {"input": "1 2", "output": "10 20", "gts": None, "score": 0.0, "step": 7}
    assert second["score"] == 1.0


def test_atif_has_what_its_models_ask_for(names: dict[str, Any]) -> None:
    """No others than the fields of v1.7 are allowed there."""
    files = sorted(Path("atif").iterdir())
    assert [file.stem for file in files] == ["7-0-0", "7-0-1", "7-1-0", "7-1-1"]
    for file in files:
        made = json.loads(file.read_text())
        assert (made["schema_version"], made["trajectory_id"]) == ("ATIF-v1.7", file.stem)
        assert made.keys() <= {"schema_version", "trajectory_id", "agent", "steps", "extra"}
        assert made["agent"].keys() == {"name", "version"}
        assert [one["step_id"] for one in made["steps"]] == [1, 2], "from 1, without a gap"
        for one in made["steps"]:
            assert one["source"] in ("system", "user", "agent")
            assert isinstance(one["message"], str)
            assert one["source"] == "agent" or "metrics" not in one
    said = json.loads(files[1].read_text())
    assert [one["message"] for one in said["steps"]] == ["What is 2+2?", "said 1"]
    assert said["steps"][1]["metrics"] == {
        "prompt_token_ids": [1, 2], "completion_token_ids": [11, 20], "logprobs": [-0.5, -2.0],
    }  # fmt: skip
    assert said["extra"] == {"reward": 1.0, "group": "0"}


def test_traces_have_what_verifiers_reads(names: dict[str, Any]) -> None:
    for line in Path("traces.jsonl").read_text().splitlines():
        one = json.loads(line)
        assert one["run"]["work"] == {"type": "train", "step": 7}
    _, second, *_ = rlskip.open("traces.jsonl").run.iter_rows()  # as tests/runs reads theirs
    assert (second["prompt"], second["response"], second["reward"]) == ([1, 2], [11, 20], 1.0)
    assert second["log_probs"] == [-0.5, -2.0]
    assert [one["content"] for one in second["completions"]] == ["said 1"]


# -- docs/extending.md: each is a whole program ------------------------------------------------


TEXT = (DOCS / "extending.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"(?ms)^```python\n(.*?)^```", TEXT)
FILES = {match[1]: block for block in BLOCKS if (match := re.match(r"# file: (\S+)\n", block))}
PROGRAMS = [block for block in BLOCKS if block not in FILES.values()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.fixture
def run(python: Any, folder: Path) -> Callable[[str], Any]:
    """``run(program)``: how a program ended that has the page's files beside it."""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "HOME": str(folder), "PYTHONPATH": path}

    def run(program: str) -> Any:
        (folder / "program.py").write_text(program, encoding="utf-8")
        return python.run("program.py", cwd=folder, env=env)

    return run


def heading(program: str) -> str:
    before = TEXT.split(program)[0]
    return str(re.findall(r"^## (.*)$", before, re.MULTILINE)[-1])


@pytest.mark.parametrize("program", PROGRAMS, ids=heading)
def test_the_example_runs(run: Any, program: str) -> None:
    done = run(program)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stdout + done.stderr


HOST = next(program for program in PROGRAMS if "myhost" in program)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fit", "reads the config and learns the steps there"),
        ("generate", "is the stage of role rollout there"),
        ("log", "theirtrainer has no theirtrainer:Trainer.log: off is skip.log_metrics"),
    ],
)
def test_a_release_of_the_trainer_without_a_seam_is_named(
    run: Any, folder: Path, name: str, said: str
) -> None:
    trainer = folder / "theirtrainer.py"
    renamed = re.sub(rf"(def |self\.){name}\(", r"\1other(", trainer.read_text("utf-8"))
    trainer.write_text(renamed, encoding="utf-8")
    done = run(HOST)
    assert said in done.stderr
    assert done.returncode == 1


def test_a_seam_that_the_trainer_never_calls_is_named(run: Any, folder: Path) -> None:
    trainer = folder / "theirtrainer.py"
    bare = trainer.read_text("utf-8").replace("            self.generate(", "            str(")
    trainer.write_text(bare, encoding="utf-8")
    done = run(HOST)
    assert "this trainer never calls theirtrainer:Trainer.generate" in done.stderr


# -- tours: every command runs, and prints every line that is shown ------------------------------


PAGES = ("README.md", "docs/quickstart.md", "docs/howto.md")


def tour(page: str) -> list[tuple[str, list[str]]]:
    """(command, lines shown) of the console blocks after ``<!-- tour -->``, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"<!-- tour -->\n```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    steps: list[tuple[str, list[str]]] = []
    for line in "".join(blocks).splitlines():
        if line.startswith("$ "):
            steps.append((line.removeprefix("$ "), []))
        elif line != "...":
            steps[-1][1].append(line)
    return steps


def files(page: str) -> dict[str, str]:
    """The blocks of a page that begin with ``# file: NAME``."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w+\n# file: (\S+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return dict(blocks)


def says(shown: str, line: str) -> bool:
    """Whether `line` is what the page shows, ``...`` standing for anything."""
    pattern = ".*".join(map(re.escape, shown.split("...")))
    return re.fullmatch(pattern, line.rstrip()) is not None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES)
def test_the_tour_is_what_happens(page: str, python: Any, tmp_path: Path) -> None:
    shutil.copy(ROOT / "train.py", tmp_path)
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    for name, text in files(page).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    scripts = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path / "home"),
        "COLUMNS": "200",
    }
    commands = tour(page)
    assert len(commands) > 4
    for command, shown in commands:
        if command.startswith("python ") and not set("|>;") & set(command):
            done = python.run(*shlex.split(command)[1:], cwd=tmp_path, env=environment)
        else:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment,
            )  # fmt: skip
        assert done.returncode == 0, f"$ {command}\n{done.stdout}\n{done.stderr}"
        lines = iter(done.stdout.splitlines())
        for expected in shown:
            # In order, with anything between.
            assert any(says(expected, line) for line in lines), (
                f"$ {command}\nnot said, or not there: {expected}\n{done.stdout}"
            )
