"""CPU seconds of the commands that look at rollouts, each in a process of its own.

page_100000_cpu_s      `rlskip report` of a run of 100 000 steps
ls_100000_cpu_s        `rlskip ls` of its dump_dir
ls_steps_100000_cpu_s  the same with --steps --limit 20
doctor_cpu_s           `rlskip doctor -- python app.py`, beyond that application with `--cfg all`
rescore_cpu_s          `rlskip rescore` of 256 sessions whose verdicts are all kept: no call
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs
import torch
from tensordict import TensorDict

from benchmarks._report import Goal, Row, arguments, report, versions
from rlskip.store import StepStore
from rlskip.store.index import IndexedDump, append, stamp_at
from rlskip.store.layout import Place

RUN = "bench_look/GBS8_N4_in8_out16"
MAIN = "import sys; from rlskip.cli.main import main; sys.exit(main({}))"
APP = """
import hydra

@hydra.main(version_base=None, config_path=None)
def main(config):
    pass

main()
"""
JUDGE = """
def length(completions, **columns):
    return [len(completion) / 16 for completion in completions]
"""


def rollouts(rows: int) -> TensorDict:
    made = torch.Generator().manual_seed(1)
    responses = torch.randint(5, 90, (rows, 16), generator=made)
    columns = {
        "prompts": torch.arange(rows // 4).repeat_interleave(4)[:, None].expand(-1, 8) + 5,
        "responses": responses,
        "response_mask": torch.ones_like(responses),
        "rm_scores": torch.rand(rows, generator=made),
    }
    return TensorDict(columns, [rows])


def many_steps(folder: Path, steps: int) -> None:
    """A run of equal dumps: the data is one file, and each step has its meta and its index line."""
    store = StepStore(folder / RUN)
    meta = store.save(1, rollouts(32))
    first, lines = Place(store.directory, 1), []
    for step in range(2, steps + 1):
        place = Place(store.directory, step)
        place.directory.mkdir()
        own = attrs.evolve(meta, step=step)
        (place.directory / place.meta).write_bytes(own.to_bytes())
        if step % 50_000:
            os.link(first.directory / first.dump, place.directory / place.dump)
        else:  # a file has at most 65 000 names
            shutil.copy(first.directory / first.dump, place.directory / place.dump)
            first = place
        stamp = stamp_at(place)
        assert stamp is not None
        lines.append(IndexedDump.of(place, own, stamp))
    append(store.directory, lines)


def cpu(folder: Path, command: list[str], status: int = 0) -> float:
    """The CPU seconds that a process takes, with those that it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "HOME": str(folder)}  # verdicts are kept there
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == status, done.stdout + done.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def rlskip(folder: Path, *words: str) -> float:
    return cpu(folder, ["-c", MAIN.format(list(words))])


def measure(folder: Path, steps: int, rounds: int) -> list[Row]:
    many_steps(folder / "many", steps)
    StepStore(folder / "few" / RUN).save(1, rollouts(256))
    (folder / "app.py").write_text(APP)
    (folder / "judge.py").write_text(JUDGE)
    rescore = ("rescore", "few", "--reward", "judge:length", "--version", "1")
    rlskip(folder, *rescore)
    explained = ["doctor", "--", sys.executable, "app.py", "+skip=rollout_cache"]

    def best(*words: str) -> float:
        return min(rlskip(folder, *words) for _ in range(rounds))

    alone = min(cpu(folder, ["app.py", "--cfg", "all"]) for _ in range(rounds))
    return [
        Row(f"page_{steps}_cpu_s", best("report", "many"), "s", goal=Goal("<=", 5)),
        Row(f"ls_{steps}_cpu_s", best("ls", "many"), "s", goal=Goal("<=", 5)),
        Row(f"ls_steps_{steps}_cpu_s", best("ls", "many", "--steps", "--limit", "20"), "s",
            goal=Goal("<=", 5)),
        Row("doctor_cpu_s", best(*explained) - alone, "s", goal=Goal("<=", 1.5)),
        Row("rescore_cpu_s", best(*rescore), "s", goal=Goal("<=", 2)),
    ]  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), options.steps, options.rounds)
    report(rows, versions("blosc2", "xxhash", "hydra-core"), options.json)


if __name__ == "__main__":
    main()
