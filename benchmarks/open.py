"""A run, opened: as a table of Arrow next to its dumps loaded, and how long opening takes.

Steps of 1024 rows with up to 1024 prompt and 4096 response tokens, padded, together about 1 GB in
memory, from a warm page cache.

open_arrow_ratio  all steps as one table without padding, next to StepStore.load of the same fields
one_field_ratio   the rewards of all steps as a table, next to all fields
open_10000_ms     opening a run of 10 000 steps, and finding one of them
page_open_s       until Chromium has drawn the page of 10 000 rows, beyond an empty page

Needs the extra `data`: $(.ci/env data) -m benchmarks.open
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections import deque
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict

import rlskip
from benchmarks._report import Goal, Row, arguments, best_of, report, versions
from rlskip.compare.sides import Dumps
from rlskip.report.page import render
from rlskip.runs.opened import Run, Runs
from rlskip.store import StepStore

ROWS, PROMPT, RESPONSE, VOCABULARY = 1024, 1024, 4096, 151_936
RUN = "bench_open/GBS128_N8_in1024_out4096"
READ = ["prompt", "response", "mask", "log_probs", "reward"]


def rollouts(step: int, rows: int) -> TensorDict:
    """A step as verl's trainers have it: prompts padded on the left, responses on the right."""
    rng = np.random.default_rng(step)
    prompt_len = rng.integers(64, PROMPT, rows, endpoint=True)
    response_len = np.clip(rng.lognormal(np.log(1200), 0.8, rows).astype(int), 1, RESPONSE)
    real_prompt = np.arange(PROMPT) >= (PROMPT - prompt_len)[:, None]
    real = np.arange(RESPONSE) < response_len[:, None]

    def ids(real: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.minimum(rng.zipf(1.2, real.shape) - 1, VOCABULARY - 1) * real)

    log_probs = (-rng.random(real.shape, np.float32) * real).astype(np.float32)
    columns = {
        "prompts": ids(real_prompt),
        "responses": ids(real),
        "attention_mask": torch.from_numpy(np.hstack([real_prompt, real]).astype(np.int64)),
        "response_mask": torch.from_numpy(real.astype(np.int64)),
        "rollout_log_probs": torch.from_numpy(log_probs),
        "rewards": torch.from_numpy(rng.random(rows)),
    }
    return TensorDict(columns, [rows])


def measure(folder: Path, steps: int, rows: int, rounds: int) -> list[Row]:
    store = StepStore(folder / RUN)
    for step in range(steps):
        store.save(step, rollouts(step, rows))
    run = rlskip.open(folder / RUN)
    fields = run.fields()
    ours, peer, one = best_of(
        rounds,
        lambda: run.to_arrow(READ),
        lambda: deque((store.load(step, fields=fields) for step in range(steps)), maxlen=1),
        lambda: run.to_arrow(["reward"]),
    )
    return [
        Row("open_arrow_ratio", ours, "s", peer, Goal("<=", 2)),
        Row("one_field_ratio", one, "s", ours),
    ]


def opening(folder: Path, rounds: int) -> Row:
    store = StepStore(folder / RUN)
    store.save(0, [1])
    for step in range(1, 10_000):
        (folder / RUN / str(step)).mkdir()

    def find() -> None:
        runs = rlskip.open(folder)
        assert isinstance(runs, Runs)
        assert runs[0][0].number == 0

    (seconds,) = best_of(rounds, find)
    return Row("open_10000_ms", 1000 * seconds, "ms")


def page(folder: Path, rounds: int) -> list[Row]:
    """No row where there is no Chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        return []
    for step in range(10):
        StepStore(folder / RUN).save(step, rollouts(step, 1000))
    side = Dumps("bench", Run(folder / RUN))
    made, _ = render([side], success=0.5, max_bytes=5_000_000)
    (folder / "page.html").write_bytes(made)
    (folder / "empty.html").write_text("<!doctype html><title>empty</title>")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
               f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=60000"]  # fmt: skip

    def show(name: str) -> bytes:
        place = (folder / name).as_uri()
        return subprocess.run([*command, place], capture_output=True, check=True).stdout

    assert b"data-ready" in show("page.html")
    whole, empty = best_of(rounds, lambda: show("page.html"), lambda: show("empty.html"))
    return [Row("page_open_s", whole - empty, "s", goal=Goal("<=", 2))]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rows", type=int, default=ROWS, help="of each step")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), options.steps, options.rows, options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        rows.append(opening(Path(folder), options.rounds))
    with tempfile.TemporaryDirectory() as folder:
        rows += page(Path(folder), options.rounds)
    report(rows, versions("tensordict", "pyarrow", "blosc2", "xxhash"), options.json)


if __name__ == "__main__":
    main()
