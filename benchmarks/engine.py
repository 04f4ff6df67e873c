"""What a replayed run saves by starting no inference engine, with genuine vLLM on the CPU.

start_ratio_HOST  CPU seconds of a run that replays one step and updates once, without an engine
                  over with one; both replay the same dump (HOST: trl, verl_v0, verl_v1);
                  for verl_ref without an engine both, without a reference model over with one
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

TESTS = Path(__file__).parents[1] / "tests"
APP = TESTS / "vllm" / "trl_app.py"
GOALS = {"trl": 0.6, "verl_v0": 0.7, "verl_v1": 0.7, "verl_ref": None}
REF = (
    "skip.ref.enable=true",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.ref.fsdp_config.strategy=fsdp2",
    "actor_rollout_ref.ref.fsdp_config.use_torch_compile=False",
    "+actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype=fp32",
)
# A model whose weights count: 60 million, where the harness's has 0.6.
LARGER = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

small, large = sys.argv[1:]
config = AutoConfig.from_pretrained(small)
config.update({"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 10,
               "num_attention_heads": 24, "num_key_value_heads": 24,
               "layer_types": ["full_attention"] * 10})
AutoModelForCausalLM.from_config(config).save_pretrained(large)
AutoTokenizer.from_pretrained(small).save_pretrained(large)
"""


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
    """A replayed run of one step of `main_ppo`: without what can be left out, and with it."""
    role = "rollout_tq" if mode == "v1" else "rollout"
    env = {"VENV": str(python.parents[1]), "ASSETS": str(folder), "STEPS": "1"}
    env["RAY_TMP"] = tempfile.mkdtemp(prefix="rl", dir="/tmp")  # its sockets need a short path
    if mode == "ref":  # judge.py lets a reference model be offloaded without a GPU
        paths = os.pathsep.join([str(TESTS / "verl"), os.environ.get("PYTHONPATH", "")])
        env |= {"VERLCPU_EXTRA_MODULES": "judge", "PYTHONPATH": paths, "NOTES": os.devnull}

    def train(name: str, option: str, *more: str) -> Cost:
        out = folder / mode / name
        command = ["bash", harness / "run_verl.sh", mode.replace("ref", "v0")]
        command += [f"+skip={role}_{option}", f"skip.dump_dir={folder / mode}", "skip.steps=[1]"]
        if mode == "ref":
            command += [*REF, f"actor_rollout_ref.model.path={folder / 'larger'}"]
        return run([*command, *more], out, {**env, "OUT": str(out)})

    if mode == "ref":
        run([python, "-c", LARGER, folder / "model", folder / "larger"], folder / "making")
    train("dump", "cache")
    without = train("without", "replay")
    if mode == "ref":
        return without, train("with", "replay", "skip.ref.enable=false")
    return without, train("with", "cache")


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
            goal = None if (limit := GOALS[host]) is None else Goal("<=", limit)
            rows += [
                Row(f"start_ratio_{host}", without.cpu_s, "CPU s", engine.cpu_s, goal),
                Row(f"wall_s_{host}", without.wall_s, "s", engine.wall_s),
                Row(f"memory_{host}", without.mib, "MiB", engine.mib),
            ]
            report(rows, versions(), options.json)  # now: a later failure loses nothing


if __name__ == "__main__":
    main()
