"""verl's genuine trainer on this machine's CPU, in its own environments.

The tests are skipped without these environment variables:

``RLSKIP_VERL091``
    A python with verl 0.9.1 and rlskip.
``RLSKIP_VERL_HARNESS``
    A folder with ``run.sh``, which starts ``python -m verl.trainer.main_ppo`` with a CPU platform
    and a tiny token server, and leaves ``server.jsonl``: a line for each real generation.
``RLSKIP_VERL_RECIPES``
    A checkout of github.com/verl-project/verl-recipe, for the test of its DAPO.

The token server samples by (seed, weights, prompt): two runs with one seed are equal to the last
bit, and a run with another seed that equals them has replayed their dump.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

_GRAD_NORM = re.compile(r"actor/grad_norm:(?:np\.float64\()?([0-9.e+-]+)")
_SCORE = re.compile(r"critic/score/mean:(?:np\.float64\()?([0-9.e+-]+)")
_LIMIT_S = 800


@attrs.frozen
class Trained:
    """A finished run of the trainer."""

    folder: Path
    returncode: int
    output: str

    @property
    def grad_norms(self) -> list[str]:
        """One per step, to the last digit."""
        return _GRAD_NORM.findall(self.output)

    @property
    def generated(self) -> int:
        """The number of sessions that were really generated, including validation."""
        file = self.folder / "server.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return sum('"generate"' in line for line in lines)

    @property
    def summary(self) -> dict[str, Any]:
        """The roles of the job's rlskip_summary.json."""
        file = self.folder / "hydra" / "rlskip_summary.json"
        roles: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["roles"]
        return roles

    @property
    def scores(self) -> list[float]:
        """The mean reward of each step."""
        return [float(score) for score in _SCORE.findall(self.output)]

    def resume_after(self, step: int) -> tuple[str, ...]:
        """Overrides that resume from the checkpoint of `step`, as if the run had ended there."""
        folder = Path(tempfile.mkdtemp(prefix="ckpt-", dir=self.folder))
        name = f"global_step_{step}"
        shutil.copytree(self.folder / "ckpt" / name, folder / name)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
        return "trainer.resume_mode=auto", f"trainer.default_local_dir={folder}"

    @property
    def started_ray(self) -> bool:
        return "ray init kwargs" in self.output


@attrs.frozen
class Processes:
    """The processes of the run in `folder`: driver, workers and Ray."""

    folder: Path

    def find(self, command: bytes = b"") -> list[int]:
        """Those whose command line contains `command`."""
        mine = f"VERLCPU_LOG_DIR={self.folder}\0".encode()
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        ours = [pid for pid in pids if mine in _of(pid, "environ")]
        return [pid for pid in ours if command in _of(pid, "cmdline")]

    def kill(self, command: bytes = b"") -> None:
        for pid in self.find(command):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill until none is left."""
        while self.find():
            self.kill()
            time.sleep(0.2)


@attrs.frozen
class Verl:
    """verl: its python and a folder for its runs."""

    python: Path
    harness: Path
    folder: Path
    ray: Path

    def train(
        self,
        name: str,
        mode: str,
        *overrides: str,
        seed: int = 1,
        steps: int = 2,
        until: Callable[[], bool] | None = None,
        kill: Callable[[Processes], None] | None = None,
        fails: bool = False,
        **env: str,
    ) -> Trained:
        """Run the harness in `mode` (v0, v1) and wait for its end.

        Once `until` is true, `kill` ends some of its processes; by default all of them. Every other
        run must succeed, or fail if it `fails`.
        """
        # For this run alone: several test files share self.folder.
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder))
        paths = [env.pop("PYTHONPATH", None), os.environ.get("PYTHONPATH")]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            # Its own home: a test that forgets dump_dir must not touch the user's dumps.
            "HOME": str(self.folder),
            "VENV": str(self.python.parent.parent),
            "OUT": str(folder),
            "ASSETS": str(self.ray / "assets"),
            "RAY_TMP": str(self.ray),
            "STEPS": str(steps),
            "VERLCPU_GEN_SEED": str(seed),
            "PYTHONDONTWRITEBYTECODE": "1",
            **env,
        }
        log = folder / "log"
        with log.open("w") as file:
            run = subprocess.Popen(
                ["bash", str(self.harness / "run.sh"), mode, *overrides],
                cwd=folder, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                if until is not None:
                    _wait_for(until, run)
                    (kill or Processes.end)(Processes(folder))
                run.wait(_LIMIT_S)
            finally:
                if run.poll() is None:
                    os.killpg(run.pid, signal.SIGKILL)
                    run.wait()
        output = log.read_text(errors="replace")
        assert until or (run.returncode != 0) is fails, output[-4000:]
        return Trained(folder, run.returncode, output)

    def train_by_coin(self, name: str, mode: str, *overrides: str, **more: Any) -> Trained:
        """As :meth:`train`; the dump's scores are dropped, and coin.py gives others.

        The run logs their means, as coin.py records them.
        """
        record = Path(tempfile.mkdtemp(prefix="coins-", dir=self.folder)) / "record"
        pay = f"reward.custom_reward_function.path={Path(__file__).with_name('coin.py')}"
        drop = "skip.drop_fields=[rm_scores]"
        run = self.train(name, mode, *overrides, drop, pay, REWARDED=str(record), **more)
        coins = [line.split() for line in record.read_text().splitlines()]
        train = [float(score) for split, score in coins if split == "train"]
        per_step = len(train) // len(run.scores)
        means = [sum(step) / per_step for step in zip(*[iter(train)] * per_step, strict=True)]
        assert run.scores == means
        return run


def _wait_for(until: Callable[[], bool], run: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not until() and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)


def _of(pid: int, name: str) -> bytes:
    """Empty for a process that has ended, or is another user's."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes() + b"\0"
    except OSError:
        return b""


_PYTHON, _HARNESS = "RLSKIP_VERL091", "RLSKIP_VERL_HARNESS"


@pytest.fixture(scope="session")
def verl091(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verl]:
    named = {name: os.environ.get(name) for name in (_PYTHON, _HARNESS)}
    for name, value in named.items():
        if not value or not Path(value).exists():
            pytest.skip(
                f"{name}={value!r} does not exist; `.ci/env verl091` makes the python, "
                f"{_HARNESS} is the folder of run.sh"
            )
    python, harness = (Path(str(value)).absolute() for value in named.values())
    # Ray's sockets need a short path.
    ray = Path(tempfile.mkdtemp(prefix="rv", dir="/tmp"))
    yield Verl(python, harness, tmp_path_factory.mktemp("verl091"), ray)
    shutil.rmtree(ray, ignore_errors=True)
