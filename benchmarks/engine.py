"""What a replayed run saves by starting no inference engine, with genuine vLLM on the CPU.

start_ratio_HOST  CPU seconds of a run that replays one step and updates once, without an engine
                  over with one; both replay the same dump (HOST: trl, verl_v0, verl_v1)
wall_s_HOST       the same in wall seconds
memory_HOST       the largest resident memory of the run's processes together, in MiB

The environment (`--python`) and the harness (`--harness`: make_assets.py, run_verl.sh) are those of
`pytest -m vllm`, by default those that $RLSKIP_VLLM and $RLSKIP_VLLM_HARNESS name. The seconds are
those of all processes that a run starts, to their end.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from benchmarks._report import Goal, Row, arguments, report, versions

APP = Path(__file__).parents[1] / "tests" / "vllm" / "trl_app.py"
GOALS = {"trl": 0.6, "verl_v0": 0.7, "verl_v1": 0.7}
_POLL_S = 0.5
_TICK = os.sysconf("SC_CLK_TCK")
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20
_SUBREAPER = 36  # prctl: orphans become children of this process, so that their seconds count


@attrs.frozen
class Cost:
    """What a run took."""

    cpu_s: float
    wall_s: float
    mib: float


def below(pid: int) -> Iterator[int]:
    """The processes that `pid` and those below it started and that still live."""
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from below(int(child))
    except OSError:  # it has just ended
        return


def _resident_mib() -> float:
    total = 0.0
    try:
        for pid in below(os.getpid()):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_MIB
    except (OSError, IndexError):  # one has just ended
        return 0.0
    return total


def run(command: Sequence[object], folder: Path, **env: str) -> Cost:
    """Run `command`, wait for all that it left behind, and sum up what they took."""
    folder.mkdir(parents=True, exist_ok=True)
    peak, ended = [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(_POLL_S):
            peak[0] = max(peak[0], _resident_mib())

    before, began = os.times(), time.perf_counter()
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    with (folder / "log").open("w") as log:
        subprocess.run(
            [*map(str, command)], cwd=folder, env={**os.environ, **env}, check=True, stdout=log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    wall_s = time.perf_counter() - began
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass
    ended.set()
    watcher.join()
    after = os.times()
    cpu_s = sum(after[2:4]) - sum(before[2:4])
    return Cost(cpu_s, wall_s, peak[0])


def trl(python: Path, harness: Path, folder: Path) -> tuple[Cost, Cost]:
    """A replayed GRPO run of one step in TRL's colocate mode: without an engine, and with one."""

    def train(name: str, *, engine: bool) -> Cost:
        job = {
            "model": str(folder / "model"),
            "trainer": "GRPOTrainer",
            "seed": 1,
            "skip": {"dump_dir": str(folder / "trl"), "start_engine": engine},
            "args": {"max_steps": 1},
        }
        (folder / f"{name}.json").write_text(json.dumps(job))
        result = folder / f"{name}.result"
        cost = run([python, APP, folder / f"{name}.json", result], folder / name)
        if error := json.loads(result.read_text())["error"]:
            raise SystemExit(error)
        return cost

    train("dump", engine=True)
    return train("without", engine=False), train("with", engine=True)


def verl(python: Path, harness: Path, folder: Path, mode: str) -> tuple[Cost, Cost]:
    """A replayed run of one step of `main_ppo`: without an engine, and with one."""
    role = "rollout" if mode == "v0" else "rollout_tq"
    env = {"VENV": str(python.parents[1]), "ASSETS": str(folder), "STEPS": "1"}
    env["RAY_TMP"] = tempfile.mkdtemp(prefix="rl", dir="/tmp")  # its sockets need a short path

    def train(name: str, option: str) -> Cost:
        out = folder / mode / name
        command = ["bash", harness / "run_verl.sh", mode, f"+skip={role}_{option}"]
        command += [f"skip.dump_dir={folder / mode}", "skip.steps=[1]"]
        return run(command, out, OUT=str(out), **env)

    train("dump", "cache")
    return train("without", "replay"), train("with", "cache")


def of_harness(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options that say where the environment and the harness are."""
    for name, variable in (("python", "RLSKIP_VLLM"), ("harness", "RLSKIP_VLLM_HARNESS")):
        given = os.environ.get(variable)
        parser.add_argument(f"--{name}", type=Path, default=given, required=given is None)
    return parser


def main() -> None:
    parser = of_harness(arguments(__doc__))
    parser.add_argument("--only", nargs="+", choices=GOALS, default=list(GOALS), metavar="HOST")
    options = parser.parse_args()
    python, harness = options.python.absolute(), options.harness.absolute()
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run([python, harness / "make_assets.py", folder], folder)
        for host in options.only:
            if host == "trl":
                without, engine = trl(python, harness, folder)
            else:
                without, engine = verl(python, harness, folder, host.removeprefix("verl_"))
            goal = Goal("<=", GOALS[host])
            rows += [
                Row(f"start_ratio_{host}", without.cpu_s, "CPU s", engine.cpu_s, goal),
                Row(f"wall_s_{host}", without.wall_s, "s", engine.wall_s),
                Row(f"memory_{host}", without.mib, "MiB", engine.mib),
            ]
            report(rows, versions(), options.json)  # now: a later failure loses nothing


if __name__ == "__main__":
    main()
