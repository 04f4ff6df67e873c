"""Turning rlskip on calls no resolver of the application's, and draws no random number."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from rlskip import SkipManager
from rlskip.errors import ConfigError, MismatchError
from rlskip.skip.dumps import capture_rng

OWN = {
    "draw": "${draw:}",
    "sampling": {"temperature": "${sched:${base}}", "same": "${sampling.temperature}"},
    "base": 1.0,
    "home": "${oc.env:HOME}",
    "lists": ["${draw:}", {"x": "a ${draw:} b"}],
    "data": {"train_batch_size": "${base_size}", "max_prompt_length": "${oc.decode:'8'}"},
    "base_size": 4,
    "trainer": {"experiment_name": "e", "project_name": "p"},
}


@pytest.fixture
def calls() -> Iterator[list[str]]:
    made: list[str] = []

    def draw() -> float:
        made.append("draw")
        return random.random() + np.random.rand() + float(torch.rand(()))

    def sched(base: float) -> float:
        made.append("sched")
        return base + len(made)

    OmegaConf.register_new_resolver("draw", draw)
    OmegaConf.register_new_resolver("sched", sched)
    yield made
    for name in ("draw", "sched"):
        OmegaConf.clear_resolver(name)


@pytest.fixture
def run(tmp_path: Path, calls: list[str]) -> Callable[..., str]:
    def start(*more: str, **skip: Any) -> str:
        node = {"dump_dir": str(tmp_path), "rollout": {"enable": True}, **skip}
        own = OmegaConf.create(OWN | {"objects": [run]}, flags={"allow_objects": True})
        made = OmegaConf.merge(own, {"skip": node}, OmegaConf.from_dotlist([*more]))
        calls.clear()  # by OmegaConf's merge
        SkipManager.init(made)
        SkipManager.set_step(1)
        return SkipManager.annotate(role="rollout", stage="s")(lambda prompts: "made")([1])

    return start


def test_no_resolver_of_the_applications_is_called(run: Any, calls: list[str]) -> None:
    before = [repr(state) for state in capture_rng().values()]
    for identity in ([], ["sampling", "draw", "lists"]):
        assert run(identity=identity) == "made"
    assert calls == []
    assert [repr(state) for state in capture_rng().values()] == before
    # What it is called with is compared, and what the other resolvers give.
    for change in ("sampling.temperature=${sched:2}", "lists=[1]"):
        with pytest.raises(MismatchError, match=r"config\.(sampling|lists)"):
            run(change, identity=["sampling", "draw", "lists"])
    (shape,) = SkipManager.skip_instances["rollout"].dumps.directory.parts[-1:]  # type: ignore
    assert shape == "GBS4_Nany_in8_outany"
    assert calls == []


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("actor_rollout_ref.rollout.n", "skip.n=2"),
        ("data.train_batch_size", "skip.gbs=4"),
        ("data.max_prompt_length", "skip.prompt_len=8"),
        ("actor_rollout_ref.rollout.response_length", "skip.response_len=8"),
        ("skip.steps", "skip.steps=1"),
        ("skip.dump_dir", "skip.dump_dir=DIR"),
    ],
)
def test_a_size_behind_a_resolver_is_refused_by_name(
    run: Any, tmp_path: Path, calls: list[str], key: str, given: str
) -> None:
    name, _, value = given.partition("=")
    with pytest.raises(ConfigError, match=r"'\$\{draw:\}'.* the application's own") as caught:
        run(f"{key}=${{draw:}}")
    assert caught.value.where == name
    assert f"{name}=..." in caught.value.remedy
    assert calls == []
    run(f"{key}=${{draw:}}", f"{name}={value.replace('DIR', str(tmp_path))}")


COUNTING = """
import random
from omegaconf import OmegaConf

def draw():
    with open("drawn", "a") as file:
        file.write("x")
    return random.random()

OmegaConf.register_new_resolver("draw", draw)
random.seed(1)
"""


def test_a_job_calls_a_resolver_as_often_as_without_rlskip(make_app: Any) -> None:
    task = "first = cfg.drawn\nprint('next:', random.random())\ntrain(cfg)"
    app = make_app(config="drawn: ${draw:}\n", functions=COUNTING, task=task)
    said = []
    for options in ((), ("+skip=rollout_cache", "skip.dump_dir=dumps", "+record=stages")):
        run = app.run(*options)
        drawn = app.folder / "drawn"
        number = next(line for line in run.out.splitlines() if line.startswith("next:"))
        said.append((drawn.read_text(), number))
        drawn.unlink()
    assert said[0] == said[1]


def test_what_is_imported_when_a_job_starts_draws_nothing() -> None:
    code = "import random; was = random.getstate(); import rlskip.skip.call_role, rlskip.hooks"
    subprocess.run([sys.executable, "-c", f"{code}; assert random.getstate() == was"], check=True)
