"""The example trainer as a user runs it: real training, real dumps, real replays."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

ROOT = Path(__file__).parents[1]
TINY = (
    "trainer.total_training_steps=3",
    "data.train_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
)


@pytest.fixture(scope="session")
def train(python: Any) -> Callable[..., list[dict[str, Any]]]:
    """Run train.py into ``folder/name``; its metrics, one mapping a step."""

    def run(folder: Path, name: str, *overrides: str, tiny: bool = True) -> list[dict[str, Any]]:
        out = folder / name
        more = (*overrides, *(TINY if tiny else ()))
        command = (ROOT / "train.py", f"hydra.run.dir={out}", *more)
        done = python.run(*command, cwd=folder, timeout=600)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

    return run


@pytest.fixture(scope="module")
def train_py() -> Any:
    """What the module has."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "train.py")))


def learned(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The metrics without the times."""
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in metrics]


def counts(folder: Path, name: str) -> tuple[int, int]:
    """(hits, misses) of a run."""
    role = json.loads((folder / name / "rlskip_summary.json").read_text())["roles"]["rollout"]
    return role["hits"], role["misses"]


SKIP = ("+skip=rollout_cache", "skip.dump_dir=dumps")
GAME = """
import torch
from train import TURN, answer, earned

def reward(prompts, completions, hidden):
    found = []
    for prompt, said, number in zip(prompts, completions, hidden, strict=True):
        guesses = torch.tensor(said[::TURN])[None]
        replies = answer(guesses, torch.tensor(number))
        found.append(earned(torch.tensor(prompt)[None], guesses, replies, 0.3).item())
    return found
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def first(train: Any, folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run that dumps each of its steps."""
    return train(folder, "first", *SKIP)


def test_the_second_run_generates_nothing_and_equals_the_first(
    train: Any, folder: Path, first: list[dict[str, Any]]
) -> None:
    plain = train(folder, "plain")
    second = train(folder, "second", *SKIP)
    assert (counts(folder, "first"), counts(folder, "second")) == ((0, 3), (3, 0))
    assert learned(first) == learned(second) == learned(plain)

    # A step whose dump is gone is generated again, that one only, and nothing else changes.
    (step,) = folder.glob("dumps/*/*/2")
    shutil.rmtree(step)
    third = train(folder, "third", *SKIP)
    assert counts(folder, "third") == (2, 1)
    assert learned(third) == learned(first)
    assert step.is_dir()

    # skip.steps says which steps are looked at; merging happens after the replay.
    merged = train(folder, "merged", *SKIP, "skip.steps=[1,3]", "+merge=prefix")
    assert counts(folder, "merged") == (2, 0)
    before, after = (
        [row[f"generate/num_seq_{when}_merge"] for row in merged] for when in ("before", "after")
    )
    assert after == [16, 16, 16], "one row a session"
    assert all(turns > sessions for turns, sessions in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("pool", "workers"),
    [
        pytest.param("local", 1, marks=pytest.mark.slow),
        pytest.param("local", 4, marks=pytest.mark.slow),
        pytest.param("ray", 2, marks=[pytest.mark.ray, pytest.mark.timeout(600)]),
    ],
)
def test_dispatched_sessions_are_those_of_the_first_run(
    train: Any, folder: Path, first: list[dict[str, Any]], pool: str, workers: int
) -> None:
    how = (f"dispatch.pool={pool}", f"dispatch.workers={workers}")
    run = train(folder, f"{pool}-{workers}", "+dispatch=rollout_level", *how)
    assert learned(run) == learned(first)


def test_a_session_is_the_same_in_any_company(train_py: Any) -> None:
    """Dispatch relies on it: sampled alone or with others, a session is equal to the last bit."""
    cfg = OmegaConf.load(ROOT / "conf" / "config.yaml")
    torch.manual_seed(0)
    policy = train_py.Policy(**cfg.actor_rollout_ref.model)
    prompts = train_py.draw_prompts(cfg, step=1).exclude("uid")

    def games(prompt: list[int], session: list[int]) -> dict[tuple[int, ...], list[Any]]:
        """The rows of each game, as bytes."""
        rows = train_py.play(policy, prompts[prompt], torch.tensor(session), cfg, 1)
        fields = {name: field.unbind() for name, field in rows.items()}
        found = defaultdict(list)
        for i in range(len(rows)):
            row = {name: values[i].numpy().tobytes() for name, values in fields.items()}
            found[int(rows["prompt"][i]), int(rows["session"][i])].append(row)
        return found

    all_games = games([i for i in range(32) for _ in range(16)], list(range(16)) * 32)
    for company in ([0], [15], [3, 9], [1, 2, 5, 11, 14], range(16)):
        for prompt in range(4):
            for name, rows in games([prompt] * len(company), list(company)).items():
                assert rows == all_games[name]


def readme_examples() -> list[str]:
    """Every `python train.py ...` in README's blocks, as typed; not the tour's (tests/docs)."""
    text = re.sub(r"<!-- tour -->.*?```\n\n", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    blocks = re.findall(r"^```(?:bash|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [
        line.split("  #")[0].split(" | ")[0].strip()
        for line in lines
        if line.startswith("python train.py")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("example", readme_examples())
def test_every_example_of_the_readme_runs(example: str, python: Any, tmp_path: Path) -> None:
    _, script, *arguments = shlex.split(example)
    assert script == "train.py"
    env = {**os.environ, "HOME": str(tmp_path)}
    runs = [[*arguments, *TINY]]
    if "skip.on_miss=error" in arguments:  # needs dumps to replay
        runs.insert(0, [one for one in runs[0] if one != "skip.on_miss=error"])
    for run in runs:
        # Overrides stand together, or argparse does not take them.
        run.sort(key=lambda argument: "=" in argument)
        done = python.run(ROOT / "train.py", *run, cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stderr


def test_readme_says_how_often_the_best_possible_player_wins() -> None:
    """By binary search: k guesses find any of 2**k - 1 numbers, and no more."""
    cfg = OmegaConf.load(ROOT / "conf" / "config.yaml")
    found = 2 ** (cfg.data.max_response_length // 2) - 1
    sizes = range(cfg.game.min_range, cfg.game.max_range + 1)
    best = sum(min(1.0, found / size) for size in sizes) / len(sizes)
    page = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"the best possible player wins {best:.3f}" in page


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_policy_learns_and_a_replay_costs_nothing(train: Any, tmp_path: Path) -> None:
    first = train(tmp_path, "first", *SKIP, tiny=False)
    second = train(tmp_path, "second", *SKIP, "trainer.total_training_steps=20", tiny=False)
    page = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    wins = r"untrained policy wins ([\d.]+) of its games and the trained one ([\d.]+) to ([\d.]+) "
    untrained, least, most = map(float, re.search(wins, page).groups())  # type: ignore[union-attr]
    assert abs(first[0]["success"] - untrained) < 0.05, "another processor rounds otherwise"
    last = [row["success"] for row in first[-10:]]
    assert least - 0.05 < sum(last) / len(last) < most + 0.05
    assert learned(first[:20]) == learned(second)
    spent = [sum(row["time/rollout_s"] for row in run) for run in (first[:20], second)]
    assert spent[1] < 0.1 * spent[0], spent  # benchmarks.step_time measures it


def test_the_games_rewards_are_reproduced(
    folder: Path, first: Any, rlskip: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    (run,) = (folder / "dumps").glob("guess_*/*")
    (folder / "game.py").write_text(GAME)
    shutil.copy(ROOT / "train.py", folder)
    monkeypatch.chdir(folder)
    again = rlskip("rescore", run, "--reward", "game:reward", "--json")
    assert again.code == 0, again.err
    assert again.json["sessions"] == 3 * 4 * 4
    assert again.json["changed"] == 0, "to the last bit"
