"""Shared fixtures: small real Hydra applications, the command `rlskip`, and an example store."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

with contextlib.suppress(ImportError):  # some environments of hosts have no hypothesis
    from hypothesis import HealthCheck, settings

    # On a busy machine, any example may take long.
    settings.register_profile("rlskip", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("rlskip")

HERE = Path(__file__).parent
RUN = "grpo_tiny/GBS4_N2_in6_out8"

# Whatever the launcher, every real generation leaves a line in the file $GENERATED.
APP = """
import os
import time
import hydra
from rlskip import SkipManager

@SkipManager.annotate(role="rollout")
def generate(prompts):
    with open(os.environ["GENERATED"], "a") as file:
        file.write(f"{prompts[0]}\\n")
    time.sleep(float(os.environ.get("SECONDS_A_STEP", 0)))
    return [10 * prompt for prompt in prompts]

def train(cfg):
    for step in (1, 2):
        SkipManager.set_step(step)
        assert generate([step]) == [10 * step], "the trainer got something else"

FUNCTIONS

@hydra.main(version_base=None, config_path="conf", config_name="config"MORE)
def main(cfg):
    TASK

if __name__ == "__main__":
    main()
"""

# So that no test depends on the second at which it started.
PLACES = """
hydra:
  run: {dir: out}
  sweep: {dir: sweep}
"""


@attrs.frozen
class Run:
    """A process that has ended."""

    returncode: int
    out: str
    err: str

    @property
    def said(self) -> str:
        return self.out + self.err


@attrs.frozen
class Started:
    """A process under way."""

    process: subprocess.Popen[str]

    def finish(self) -> Run:
        out, err = self.process.communicate(timeout=240)
        return Run(self.process.returncode, out, err)


class App:
    """A Hydra application in `folder`: its primary config, and what its main(cfg) does.

    `hydra_main` is added to the arguments of `@hydra.main`; `python` runs it.
    """

    def __init__(
        self,
        folder: Path,
        config: str = "a: 1\n",
        task: str = "train(cfg)",
        functions: str = "",
        hydra_main: str = "",
        python: str = sys.executable,
    ) -> None:
        self.folder = folder
        self.python = python
        (folder / "conf").mkdir(parents=True)
        source = APP.replace("FUNCTIONS", functions).replace("MORE", hydra_main)
        source = source.replace("TASK", task.strip().replace("\n", "\n    "))
        (folder / "app.py").write_text(source, encoding="utf-8")
        (folder / "conf" / "config.yaml").write_text(config + PLACES, encoding="utf-8")

    def start(self, *arguments: str, flags: Sequence[str] = (), **env: str) -> Started:
        """Run `python [flags] app.py [arguments]`, with `env` beside the environment."""
        env = {
            **os.environ,
            # A home of its own: a test that forgets dump_dir must not touch the user's dumps.
            "HOME": str(self.folder),
            "GENERATED": str(self.folder / "generated"),
            **env,
        }
        command = [self.python, *flags, "app.py", *arguments]
        pipe = subprocess.PIPE
        return Started(
            subprocess.Popen(command, cwd=self.folder, env=env, stdout=pipe, stderr=pipe, text=True)
        )

    def run(self, *arguments: str, **more: Any) -> Run:
        return self.start(*arguments, **more).finish()

    @property
    def generated(self) -> list[int]:
        """The steps that were really generated, over all runs so far, sorted."""
        file = self.folder / "generated"
        return sorted(map(int, file.read_text().split())) if file.exists() else []

    def summary(self, job: str = "out") -> dict[str, Any]:
        """The roles of a job's rlskip_summary.json."""
        file = self.folder / job / "rlskip_summary.json"
        roles: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["roles"]
        return roles


@pytest.fixture
def make_app(tmp_path: Path) -> Callable[..., App]:
    """``make_app(config="...", task="...")``, any number of times."""
    numbers = iter(range(100))
    return lambda **given: App(tmp_path / f"app{next(numbers)}", **given)


@pytest.fixture
def app(make_app: Callable[..., App]) -> App:
    """An application without a `skip` node."""
    return make_app()


# -- the command `rlskip` ----------------------------------------------------------------------


@attrs.frozen
class Answer:
    """What a command printed and returned."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def rlskip(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Answer]:
    """``rlskip("ls", path)``: the command with these arguments."""
    monkeypatch.setenv("COLUMNS", "100")

    from rlskip.cli.main import main

    def run(*arguments: object) -> Answer:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Answer(code, *capsys.readouterr())

    return run


@pytest.fixture
def store(tmp_path: Path) -> Any:
    """An empty StepStore."""
    from rlskip.store import StepStore

    return StepStore(tmp_path / "run")


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """For hundreds of saves, which need not wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(scope="session")
def _example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("example") / "dumps"
    runpy.run_path(str(HERE / "cli" / "example_store.py"))["make"](root)
    return root


@pytest.fixture
def dumps(_example: Path, tmp_path: Path) -> Path:
    """A fresh copy of the example store: two runs of three steps, and two jobs' records."""
    return Path(shutil.copytree(_example, tmp_path / "dumps"))


@pytest.fixture
def run_dir(dumps: Path) -> Path:
    return dumps / RUN


@pytest.fixture(scope="session")
def verl_files() -> Path:
    """Dumps that verl's own code wrote (make.py in that directory)."""
    return HERE / "interop" / "verl_dumps"


@pytest.fixture(scope="module")
def adapter() -> Iterator[Any]:
    """A real TransferQueue (SimpleStorage) on a local Ray."""
    ray = pytest.importorskip("ray")
    transfer_queue = pytest.importorskip("transfer_queue")

    from rlskip.queue import TransferQueueAdapter

    # One CPU for the controller, one for each of the two storage units, one for a task.
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield TransferQueueAdapter()
    transfer_queue.close()
    ray.shutdown()
