"""What the pages must cover, and that what they name and state is there."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from benchmarks import verl_steps
from rlskip import DispatchConfig, MergeConfig, RecordConfig, ReplayConfig, SkipManagerConfig
from rlskip.config.skip import AttachConfig

ROOT = Path(__file__).parents[2]


def errors() -> dict[str, str]:
    """Every subclass of RlskipError and its docstring: some modules need a host to be imported."""
    bases: dict[str, list[str]] = {}
    said: dict[str, str] = {}
    for file in (ROOT / "rlskip").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
                said[node.name] = ast.get_docstring(node) or ""
    found = {"RlskipError"}
    while more := {name for name, of in bases.items() if found & set(of)} - found:
        found |= more
    return {name: said[name] for name in found if not name.startswith("_")}


def test_every_error_says_when_it_is_raised() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    found = errors()
    assert len(found) > 30
    assert all(found.values())
    assert [name for name in found if f"| `{name}` |" not in page] == []
    named = set(re.findall(r"`([A-Z]\w+(?:Error|Failure))`", page))
    assert named - {"ValueError", "OSError"} <= set(found), "an error that is gone"


def test_every_page_is_in_the_navigation() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^(\w+)$", index, re.MULTILINE)
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"}
    assert set(listed) == pages


def test_every_linked_file_exists() -> None:
    """Beside the build of the pages: that is in .ci/run alone."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
    found = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    ]
    assert len(found) > 40
    assert [(page.name, link) for page, link in found if not (page.parent / link).exists()] == []


def test_the_reference_needs_no_other_extra_than_docs(python: Any) -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    modules = re.findall(r"automodule:: (\S+)", page)
    assert len(modules) > 8
    others = ("ray", "matplotlib", "tqdm", "hypothesis", "PIL")
    code = f"import sys; sys.modules.update(dict.fromkeys({others})); import {', '.join(modules)}"
    done = python.run("-c", code)
    assert done.returncode == 0, done.stderr


def test_nothing_is_installed_from_a_package_index() -> None:
    """Of rlskip by its name alone: its extras are those of the rlskip that is installed."""
    told = re.compile(r"pip install (?:-\S+ )*rlskip(?![\w\[/.-])")
    patterns = ("*.md", "docs/*.md", "rlskip/**/*.py")
    files = {file for pattern in patterns for file in ROOT.glob(pattern)}
    found = [file for file in files if told.search(file.read_text(encoding="utf-8"))]
    assert [file.name for file in found if file.name != "CHANGELOG.md"] == []


def test_the_docs_and_readme_stay_short() -> None:
    """Without the tables that are made from the code."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    made = re.compile(r"<!-- ([\w: ]+) -->.*?<!-- /\1 -->", re.DOTALL)
    assert sum(len(made.sub("", text).split()) for text in texts) <= 20_000


def test_the_tables_are_current() -> None:
    pytest.importorskip("tomllib", reason="the pages are made with Python 3.11 or newer")
    tables = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "tables.py")))
    made = tables.made()
    pages = {page: page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")}
    old = [page.name for page, text in pages.items() if tables.current(text, made) != text]
    assert old == [], "run python docs/tables.py"
    whole = "".join(pages.values())
    for name in made:
        assert whole.count(f"<!-- {name} -->") == whole.count(f"<!-- /{name} -->") == 1


def test_troubleshooting_names_messages_that_there_are() -> None:
    """What an entry begins with in backticks; `...` in it stands for anything."""
    of_hydra = {"Could not find 'skip/", "'", "Config group override must be a string or a list"}
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    code = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "rlskip").rglob("*.py"))
    code = re.sub(r'"\s+f?"', "", code)
    named = [
        part.strip()
        for entry in re.findall(r"^- (`[^:]*?`(?:, `[^:]*?`)*)", page, re.MULTILINE)
        for message in re.findall(r"`([^`]+)`", entry)
        for part in message.split("...")
    ]
    assert len(named) > 30
    assert [part for part in named if part not in code and part not in of_hydra] == []


# -- keys and options --------------------------------------------------------------------------


OPTIONS = sorted((ROOT / "rlskip_conf" / "skip").glob("*.yaml"))
CONFIGS = (
    SkipManagerConfig, DispatchConfig, MergeConfig, ReplayConfig, RecordConfig, AttachConfig,
)  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS)
def test_every_key_has_a_comment_on_the_page_of_keys(config: Any) -> None:
    page = (ROOT / "docs" / "keys.md").read_text(encoding="utf-8")
    table = page.partition(f"<!-- keys: {config.__name__} -->")[2].partition("<!-- /")[0]
    for field in dataclasses.fields(config):
        assert re.search(rf"^\| `{field.name}` \| .* \| `.*` \| \w.* \|$", table, re.MULTILINE)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda path: path.stem)
def test_every_option_is_documented(option: Path) -> None:
    assert f"`+skip={option.stem}`" in (ROOT / "docs" / "skip.md").read_text(encoding="utf-8")
    assert f"python train.py +skip={option.stem}" in option.read_text(encoding="utf-8")


# -- docs/design.md ----------------------------------------------------------------------------


_RACE = re.compile(r"- .+: `(\w+)\.(\w+)\.(\w+)`, `([\w/]+\.py)(?:::(\w+))?`")


def _races() -> list[str]:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = text.split("\n## Races\n")[1].split("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("- ")]


@pytest.mark.parametrize("line", _races())
def test_a_race_has_a_comment_and_a_test(line: str) -> None:
    found = _RACE.fullmatch(line)
    assert found, line
    room, module, name, test_file, test = found.groups()
    code = (ROOT / "rlskip" / room / f"{module}.py").read_text(encoding="utf-8")
    after = re.split(rf"(?:def|class) {name}\b", code)
    assert len(after) > 1, f"{module}.py has no {name}"
    body = re.split(r"\n(?: {0,4})(?:async def|def|class|@)", after[1])[0]
    assert '"""' in body or "# " in body, f"{name} does not tell it"
    tests = (ROOT / "tests" / test_file).read_text(encoding="utf-8")
    assert test is None or f"def {test}(" in tests


def test_the_main_paths_are_of_functions_that_there_are() -> None:
    """The first column of the listings: `module.name`, `Class.name`, or a name alone."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    listings = re.findall(r"^## A [a-z ]+\n\n```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    heads = [re.split(r"\s{2,}", line.strip())[0] for one in listings for line in one.splitlines()]
    names = {name.rpartition(".")[2] for head in heads for name in head.split(", ")} - {"the stage"}
    code = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "rlskip").rglob("*.py"))
    assert len(names) > 20
    assert [one for one in names if not re.search(rf"(?:def|class) {one}\b", code)] == []


# -- figures: those of benchmarks/results.json; README has no others than are held -------------


def rows(node: Any) -> dict[str, dict[str, Any]]:
    if isinstance(node, dict) and "what" in node:
        return {node["what"]: node}
    parts = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return {name: row for part in parts for name, row in rows(part).items()}


ROWS = rows(json.loads((ROOT / "benchmarks" / "results.json").read_text(encoding="utf-8")))
# Where else a number of README is held: the test that fails when it is another one.
ELSEWHERE = {
    "90": "the page that is linked",
    "0.12": "test_train.py: the untrained policy",
    "0.71": "test_train.py: the trained policy, at least",
    "0.87": "test_train.py: the trained policy, at most",
    "0.995": "test_train.py: the best possible player",
}


def text(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_every_number_of_readme_is_held() -> None:
    cfg = OmegaConf.load(ROOT / "conf" / "config.yaml")
    metadata = text("pyproject.toml")
    (oldest,) = re.findall(r'requires-python = ">=([\d.]+)"', metadata)
    hosts, verl = text("docs/hosts.md"), text("docs/verl.md")
    trl, skyrl = (re.search(rf"Tested with {it} ([\d.]+)\.\d", hosts)[1] for it in ("TRL", "SkyRL"))  # type: ignore[index]
    main_ppo = re.search(r"\| ([\d.]+) `main_ppo`", verl)[1]  # type: ignore[index]
    generated, replayed = ROWS["run_replayed"]["peer"], ROWS["run_replayed"]["ours"]
    step = ROWS["grpo_step_s"]
    stated = [
        f"{verl_steps.STEPS} steps of verl",
        f"{generated:.0f} CPU seconds",
        f"{replayed:.0f} when they are replayed",
        f"{ROWS['run_no_engine']['ours']:.0f} without the engine",
        f"after {cfg.trainer.total_training_steps} steps",
        f"took {ROWS['first_run_s']['ours']:.0f} s on a 2-core machine",
        f"of which rollouts took {ROWS['rollouts']['peer']:.1f} s",
        f"{ROWS['rollouts']['ours']:.1f} s instead of {ROWS['rollouts']['peer']:.1f} s",
        f"took {step['ours']:.1f} s instead of {step['peer']:.1f} s",
        f"Python {oldest} or newer",
        "Python 3.11 or newer",
        f"on {oldest}.",
        f"verl {main_ppo} ",
        f"TRL {trl} ",
        f"SkyRL {skyrl}]",
    ]
    page = text("README.md")
    assert [one for one in stated if one not in page] == []
    held = {number for one in stated for number in re.findall(r"\d[\d.]*\d|\d", one)}
    prose = re.sub(r"```.*?```|\(http\S*|\bH100\b|Apache-2\.0", "", page)
    found = set(re.findall(r"(?<![\w.-])\d[\d.]*\d|(?<![\w.-])\d", prose))
    assert found - held - {*ELSEWHERE} == set()


def test_the_seconds_of_a_replay_without_an_engine() -> None:
    row, mib, page = ROWS["start_ratio_trl"], ROWS["memory_trl"], text("docs/hosts.md")
    assert f"takes {row['ours']:.1f} CPU seconds without an engine and {row['peer']:.1f}" in page
    assert f"{mib['ours'] / 1024:.1f} instead of {mib['peer'] / 1024:.1f} GiB" in page
