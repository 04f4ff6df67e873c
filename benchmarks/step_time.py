"""What skipping saves in the example trainer: the same run twice, generated and replayed.

first_run_s, second_run_s  seconds of the whole process
rollouts                   seconds of all rollouts, second run over first
update                     the same for all updates, which skip does not change

Both runs are real: `python train.py +skip=rollout_cache` with an empty dump_dir, then again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks._report import Goal, Row, arguments, report, versions

TRAIN = Path(__file__).parents[1] / "train.py"


def run(folder: Path, name: str, overrides: list[str]) -> tuple[float, np.ndarray]:
    """Train once; returns the total seconds and the [steps, 2] seconds of rollouts and update."""
    start = time.perf_counter()
    subprocess.run(
        [
            sys.executable, str(TRAIN), f"hydra.run.dir={folder / name}", "+skip=rollout_cache",
            f"skip.dump_dir={folder / 'dumps'}", *overrides,
        ],
        check=True,
    )  # fmt: skip
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    seconds = time.perf_counter() - start
    return seconds, np.array([[step["time/rollout_s"], step["time/update_s"]] for step in steps])


def plot(first: np.ndarray, second: np.ndarray, file: Path) -> None:
    """Draw the seconds of each step, generated and replayed, with rollouts and update separate."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, both = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for axes, run, name in zip(both, (first, second), ("first run", "second run"), strict=True):
        steps = np.arange(1, len(run) + 1)
        axes.bar(steps, run[:, 0], width=1, color="#e08a3c", label="rollouts")
        axes.bar(steps, run[:, 1], width=1, bottom=run[:, 0], color="#1f6fb4", label="update")
        axes.set_title(
            f"{name}: {run[:, 0].sum():.1f} s rollouts, {run[:, 1].sum():.0f} s update",
            loc="left", fontsize=10,
        )  # fmt: skip
        axes.set(xlabel="training step", xlim=(0.5, len(run) + 0.5))
        axes.spines[["top", "right"]].set_visible(False)
    both[0].set_ylabel("seconds a step")
    both[0].legend(frameon=False, loc="upper right")
    figure.suptitle("python train.py +skip=rollout_cache", family="monospace", fontsize=10)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the steps here")
    parser.add_argument("overrides", nargs="*", help="for train.py")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        first_s, first = run(Path(folder), "first", options.overrides)
        second_s, second = run(Path(folder), "second", options.overrides)
    if options.plot is not None:
        plot(first, second, options.plot)
    (first_rollouts, first_update), (rollouts, update) = first.sum(0), second.sum(0)
    rows = [
        Row("first_run_s", first_s, "s"),
        Row("second_run_s", second_s, "s"),
        Row("rollouts", rollouts, "s", first_rollouts, Goal("<=", 0.02)),
        Row("update", update, "s", first_update),
    ]
    report(rows, versions(), options.json)


if __name__ == "__main__":
    main()
