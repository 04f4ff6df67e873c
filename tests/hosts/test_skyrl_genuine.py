"""SkyRL's genuine training on the CPU: BasePPOExp, RayPPOTrainer, FSDP2 workers in Ray actors.

Skipped without these environment variables:

``RLSKIP_SKYRL``
    A python with SkyRL and rlskip (`.ci/env skyrl` makes it).
``RLSKIP_SKYRL_HARNESS``
    A folder with ``assets.py``, which writes a tiny model and questions into the present directory;
    ``cfg.sh``, which makes the array ARGS of SkyRL's arguments for ``$OUT``; ``cpu_exp.py SKIP
    SEED ARGUMENT...``, which trains with a sampler on the CPU in place of the engines, prints
    GENERATING for each generation, and runs rlskip if SKIP is no ``-``; and ``shim/``, a folder
    for PYTHONPATH that gives SkyRL the CPU where it asks for CUDA, adds what a step logs to the
    file $SKY_METRICS as a line of JSON, and lets an environment take $SKY_TURNS turns.

A run with another seed that logs the same to the last bit has replayed the dumps.
"""

from __future__ import annotations

import json
import os
import shutil
import string
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

pytestmark = [pytest.mark.skyrl, pytest.mark.timeout(1800)]

REPOSITORY = Path(__file__).parents[2]
SAMPLES = 2 * 4 * 2  # steps, questions of a batch, samples of a question
# Two questions, before the training and after each step.
EVALUATES = (
    "trainer.eval_interval=1", "trainer.eval_before_train=true", "data.val_data=['val.jsonl']",
    "trainer.eval_batch_size=2",
)  # fmt: skip
NORM, LOSS = "policy/grad_norm", "policy/policy_loss"
# The command that docs/hosts.md has.
COMMAND = (
    "-m",
    "skyrl.train.entrypoints.main_base",
    "trainer.override_entrypoint=rlskip.hosts.skyrl",
)


# Runs in each process after the shim's own sitecustomize: only a session's last turn is rewarded.
# SkyRL ignores rewards of other turns, unless their rows are merged, by its own merge too.
SITE = """
import os

with open(os.environ["SKY_SHIM"]) as file:
    exec(compile(file.read(), file.name, "exec"))

from wrapt import register_post_import_hook


def reward_the_last_turn(module):
    step = module.GSM8kEnv.step

    def stepping(self, action):
        turn = step(self, action)
        return turn if turn["done"] else {**turn, "reward": 0.0}

    module.GSM8kEnv.step = stepping


register_post_import_hook(reward_the_last_turn, "skyrl_gym.envs.gsm8k.env")
"""


@attrs.frozen
class Run:
    """A finished run."""

    folder: Path
    output: str
    logged: list[dict[str, Any]]

    @property
    def generated(self) -> int:
        return self.output.count("GENERATING")

    def values(self, name: str) -> list[float]:
        """What the steps of training logged by that name."""
        return [line[name] for line in self.logged if name in line]

    def untimed(self, first: int = 0) -> list[dict[str, Any]]:
        """What was logged from step `first` on, without what depends on the machine's pace."""
        timed = ("timing/", "_time_", "per_second", "rlskip/")
        return [
            {name: value for name, value in line.items() if not any(t in name for t in timed)}
            for line in self.logged
            if line["step"] >= first
        ]


@pytest.fixture(scope="module")
def sky(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Run]]:
    """``sky(name, skip, *arguments, seed=1, turns=1, fails=False)``: a run of two steps.

    A seed samples on the CPU. Without one it is the documented command, which has no such sampler.
    """
    named = [os.environ.get(name) for name in ("RLSKIP_SKYRL", "RLSKIP_SKYRL_HARNESS")]
    if not all(path and Path(path).exists() for path in named):
        pytest.skip(f"RLSKIP_SKYRL, RLSKIP_SKYRL_HARNESS: {named}; `.ci/env skyrl` makes the first")
    python, harness = (str(Path(str(path)).absolute()) for path in named)
    folder = tmp_path_factory.mktemp("skyrl")
    (folder / "site").mkdir()
    (folder / "site/sitecustomize.py").write_text(SITE)
    path = os.pathsep.join([f"{folder}/site", f"{harness}/shim", str(REPOSITORY)])
    ray = Path(tempfile.mkdtemp(prefix="rs", dir="/tmp"))  # Ray's sockets need a short path
    env = {
        **os.environ, "PYTHONPATH": path, "SKY_SHIM": f"{harness}/shim/sitecustomize.py",
        "OUT": str(folder), "HOME": str(folder), "SKYCPU": "1", "SKY_RAY_TMP": str(ray),
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
        "RAY_raylet_start_wait_time_s": "240", "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0", "SKYRL_DUMP_INFRA_LOG_TO_STDOUT": "1",
    }  # fmt: skip
    subprocess.run([python, f"{harness}/assets.py"], cwd=folder, env=env, check=True)
    questions = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "val.jsonl").write_text("".join(questions[:2]))

    def run(
        name: str, skip: Any, *arguments: str,
        seed: int | None = 1, turns: int = 1, fails: bool = False,
    ) -> Run:  # fmt: skip
        file, metrics, log = (folder / f"{name}.{kind}" for kind in ("yaml", "metrics", "log"))
        file.write_text(json.dumps(skip))
        start = COMMAND if seed is None else (f"{harness}/cpu_exp.py", str(file), str(seed))
        ours = [
            "trainer.run_name=same", "trainer.max_training_steps=2",
            f"trainer.ckpt_path={folder}/ckpt_{name}", f"trainer.export_path={folder}/export",
            f"trainer.log_path={folder}/logs", *arguments,
        ]  # fmt: skip
        here = {"SKY_METRICS": str(metrics), "SKY_TURNS": str(turns), "RLSKIP_CONFIG": str(file)}
        # cfg.sh has bash's arrays.
        source = 'source "$0"; n=$1; shift; exec "${@:1:n}" "${ARGS[@]}" "${@:n+1}"'
        command = ["bash", "-c", source, f"{harness}/cfg.sh", str(1 + len(start)), python, *start]
        with log.open("w") as file_:
            done = subprocess.run(
                [*command, *ours], cwd=folder, env={**env, **here}, stdout=file_,
                stderr=subprocess.STDOUT, timeout=900,
            )  # fmt: skip
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        text = log.read_text(errors="replace")
        assert (done.returncode != 0) is fails, text[-4000:]
        return Run(folder, text, [json.loads(line) for line in lines])

    yield run
    shutil.rmtree(ray, ignore_errors=True)


def on(name: str, engine: bool = True, **more: Any) -> dict[str, Any]:
    """The config of rlskip with the dumps `name`."""
    skip = {"dump_dir": f"dumps_{name}", "start_engine": engine, "rollout": {"enable": True}}
    return {"skip": {**skip, "validation": "replay"}, **more}


@pytest.fixture(scope="module")
def a(sky: Callable[..., Run]) -> Run:
    """Dumps, evaluates and leaves a checkpoint of each step."""
    record = {"enable": True, "dump_dir": "dumps_a"}
    return sky("a", on("a", record=record), *EVALUATES, "trainer.ckpt_interval=1")


def test_a_bundle_of_its_step_is_computed_again(a: Run, rlskip: Any) -> None:
    (run,) = (a.folder / "dumps_a").glob("same_*/GBS*")
    bundle = a.folder / "step.bundle"
    assert rlskip("bundle", run, 2, "-o", bundle).code == 0
    command = ("bundle", "--replay", bundle, "--advantages", "grpo", "--loss", "ppo", "--json")
    advantages, loss = (one["state"] for one in rlskip(*command).json["stages"])
    assert advantages == "equal", "to the bit"
    assert loss in ("equal", "within rounding")


def test_the_first_run_trains(a: Run) -> None:
    assert a.generated == SAMPLES + 3 * 2
    assert len(a.values(NORM)) == len(a.values(LOSS)) == 2
    assert all(a.values(NORM))
    assert any(a.values(LOSS))
    assert len(a.values("eval/all/avg_score")) == 3


def test_the_second_run_generates_nothing_and_logs_the_same(sky: Any, a: Run) -> None:
    b = sky("b", on("a"), *EVALUATES, seed=2)
    assert b.generated == 0
    assert b.untimed() == a.untimed()


def test_the_documented_command_replays_without_an_engine(sky: Any, a: Run) -> None:
    c = sky("c", on("a", engine=False), *EVALUATES, seed=None)
    assert c.untimed() == a.untimed()


def test_a_run_that_resumes_replays_the_rest(sky: Any, a: Run) -> None:
    checkpoints = a.folder / "ckpt_d"
    shutil.copytree(a.folder / "ckpt_a/global_step_1", checkpoints / "global_step_1")
    (checkpoints / "latest_ckpt_global_step.txt").write_text("1")
    resume = ("trainer.resume_mode=latest", "trainer.ckpt_interval=1")
    d = sky("d", on("a", engine=False), *EVALUATES, *resume, seed=None)
    assert len(d.values(NORM)) == 1
    assert d.untimed(2) == a.untimed(2)


def test_without_an_engine_and_a_dump_the_steps_are_named_before_models_are_made(sky: Any) -> None:
    e = sky("e", on("none", engine=False), seed=None, fails=True)
    assert "ConfigError" in e.output
    assert "steps 1,2 have no usable dump" in e.output
    assert e.logged == []


def test_stages_are_recorded_and_those_of_a_replay_are_equal(sky: Any, rlskip: Any) -> None:
    def run(name: str, seed: int) -> Path:
        done = sky(name, on("s", record={"enable": True, "dump_dir": f"records_{name}"}), seed=seed)
        return Path(done.folder, f"records_{name}")

    answer = rlskip("compare", run("s", 1), run("u", 2), "--json")
    assert answer.code == 0, answer.out
    names = [one["stage"] for one in answer.json["steps"][1]["stages"]]
    assert names[:2] == ["rollouts", "mask"]
    assert {"old_log_probs", "rewards", "advantages", "returns", f"metrics.{NORM}",
            f"metrics.{LOSS}"} <= set(names)  # fmt: skip
    assert not [name for name in names if "tim" in name]


# SkyRL tokenizes the history of each turn again: a turn continues the one before if its tokens have
# a text, and end with the tokenizer's end, which SkyRL adds after a stop string.
STOP = json.dumps([*string.ascii_letters, *string.digits, *"!#%()*+-./:;<=>?@^_|~ "])
TURNS = (
    "generator.step_wise_trajectories=true", "generator.max_turns=2",
    "generator.sampling_params.max_generate_length=2", f"generator.sampling_params.stop={STOP}",
)  # fmt: skip


def test_merged_turns_train_as_unmerged_ones(sky: Any) -> None:
    unmerged = sky("t", on("t"), *TURNS, turns=2)
    assert unmerged.generated == 2 * SAMPLES
    merge = {"stepwise_output": True}
    merged = sky("m", on("t", engine=False, merge=merge), *TURNS, seed=None, turns=2)
    before, after = (merged.values(f"generate/num_seq_{x}_merge") for x in ("before", "after"))
    assert before == [16, 16]
    assert all(8 <= rows < 16 for rows in after)
    assert merged.values("generate/batch_num_seq") == after
    # A loss on the samples of its own policy may be 0.0. AdamW enlarges the rounding of step 1.
    # In a step of so few samples all groups may be of equal rewards.
    assert any(unmerged.values(NORM))
    for name in (LOSS, NORM):
        assert merged.values(name) == pytest.approx(unmerged.values(name), rel=1e-3, abs=1e-6)


# Two letters a sample make many groups of equal rewards, which the filter drops.
FILTER = (
    "trainer.algorithm.dynamic_sampling.type=filter", "trainer.max_training_steps=1",
    "generator.sampling_params.max_generate_length=2",
)  # fmt: skip


def test_dynamic_sampling_replays_each_call_of_a_step(sky: Any) -> None:
    first = sky("f", on("f"), *FILTER, seed=3)
    assert first.generated > 8, "one batch is not enough for a step"
    second = sky("g", on("f"), *FILTER, seed=4)
    assert second.generated == 0
    assert second.untimed() == first.untimed()
    assert all(first.values(NORM))
