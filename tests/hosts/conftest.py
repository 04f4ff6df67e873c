"""A training library that does not know rlskip, and a Hydra application that uses it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest

from rlskip import SkipManager

# Each real generation appends a line to the file $GENERATED.
LIBRARY = """
import asyncio
import os


class State:
    global_step = 0


def note(line):
    with open(os.environ["GENERATED"], "a") as file:
        file.write(f"{line}\\n")


def sample(batch, temperature):
    note(f"function {batch['ids'][0]}")
    return [10 * i for i in batch["ids"]]


class Trainer:
    def __init__(self, temperature=1.0):
        self.state = State()
        self.temperature = temperature

    def generate(self, model, batch, eval=False):
        note(f"method {self.state.global_step}" + (" eval" if eval else ""))
        return [10 * i for i in batch["ids"]]

    async def agenerate(self, batch):
        note(f"async {batch['meta']['step']}")
        await asyncio.sleep(0)
        return [10 * i for i in batch["ids"]]

    def fit(self, steps=2):
        for step in range(1, steps + 1):
            self.state.global_step = step
            ids = [step, step + 1]
            assert self.generate("model", {"ids": ids}) == [10 * i for i in ids]
            assert self.generate("model", {"ids": [0]}, eval=True) == [0]

    def fit_async(self, steps=2):
        async def loop():
            batches = [{"ids": [s], "meta": {"step": s}} for s in range(1, steps + 1)]
            return await asyncio.gather(*map(self.agenerate, batches))

        assert asyncio.run(loop()) == [[10 * s] for s in range(1, steps + 1)]

    def fit_function(self, steps=2):
        for step in range(1, steps + 1):
            assert sample({"ids": [step]}, self.temperature) == [10 * step]
"""

APP = """
import hydra

@hydra.main(version_base=None, config_path=".", config_name="config")
def main(cfg):
    from somelib.trainer import Trainer
    getattr(Trainer(cfg.temperature), cfg.fit)()

if __name__ == "__main__":
    main()
"""

CONFIG = """
fit: fit
temperature: 1.0
hydra:
  run: {dir: out}
  sweep: {dir: sweep}
"""

# What a user adds: functions that return the step.
GLUE = """
def step_of(self, model, batch, eval=False):
    return None if eval else self.state.global_step

def first_id(batch, temperature):
    return batch["ids"][0]
"""


@pytest.fixture(scope="session")
def python_path() -> Callable[..., str]:
    """``python_path(folder)``: the PYTHONPATH of this process with `folder` in front."""

    def prepend(folder: object) -> str:
        return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])

    return prepend


@pytest.fixture
def verl_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as one of a job of verl 0.9.1, by that name only, without a SkipManager."""
    monkeypatch.setenv("RLSKIP_JOB", "job")
    monkeypatch.setitem(sys.modules, "verl", types.SimpleNamespace(__version__="0.9.1"))
    SkipManager.reset()
    yield
    SkipManager.reset()


@attrs.frozen
class App:
    folder: Path

    def run(self, *arguments: str, command: tuple[str, ...] = ("app.py",)) -> tuple[int, str]:
        """Run the application; its exit status and its output."""
        env = {
            **os.environ,
            "HOME": str(self.folder),
            "GENERATED": str(self.folder / "generated"),
        }
        done = subprocess.run(
            [sys.executable, *command, *arguments],
            cwd=self.folder, env=env, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def generated(self) -> list[str]:
        """What was generated since the last call."""
        file = self.folder / "generated"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return lines


@pytest.fixture
def app(tmp_path: Path) -> App:
    (tmp_path / "somelib").mkdir()
    (tmp_path / "somelib" / "__init__.py").touch()
    (tmp_path / "somelib" / "trainer.py").write_text(LIBRARY)
    (tmp_path / "glue.py").write_text(GLUE)
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "config.yaml").write_text(CONFIG)
    return App(tmp_path)


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """``third_party(source)``: the name of a fresh module of that source, not imported yet."""
    monkeypatch.syspath_prepend(tmp_path)
    names: list[str] = []

    def write(source: str) -> str:
        name = f"third_party_{tmp_path.name.replace('-', '_')}_{len(names)}"
        names.append(name)
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return name

    yield write
    for name in names:
        sys.modules.pop(name, None)
