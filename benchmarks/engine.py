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
import json
import os
import tempfile
from pathlib import Path

from benchmarks._processes import Cost, run
from benchmarks._report import Goal, Row, arguments, report, versions

APP = Path(__file__).parents[1] / "tests" / "vllm" / "trl_app.py"
GOALS = {"trl": 0.6, "verl_v0": 0.7, "verl_v1": 0.7}


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
        return run(command, out, {**env, "OUT": str(out)})

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
