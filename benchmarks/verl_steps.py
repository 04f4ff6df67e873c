"""What a replay saves in verl: 20 steps generated, replayed, and replayed without an engine.

run_replayed         CPU seconds of the whole run that replays with an engine; peer: generates
run_no_engine        the same without an engine; peer: generates
generation_replayed  CPU seconds of the steps' generation, replayed; peer: generated
start_up_no_engine   CPU seconds until the first step begins (processes, weights, the inference
                     engine), without an engine; peer: with one

verl 0.9.1's genuine `main_ppo` (V0) with genuine vLLM on the CPU; the environment and the harness
are those of `pytest -m vllm`. CPU seconds are those of all processes together. A step's are
divided between generation and the rest (log-probs, advantages, updates) as its wall seconds are
(`timing_s` in verl's log).
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from benchmarks._processes import Cost, run
from benchmarks._report import Row, arguments, report, versions
from benchmarks.engine import of_harness

Parts = dict[str, float]  # CPU seconds of the start, of generation, and of the rest of the steps

STEPS = 20
RUNS = {"generated": "cache", "replayed": "cache", "replayed, no engine": "replay"}
COLOURS = {"start_up": "0.75", "generation": "#e08a3c", "rest": "#1f6fb4"}
OVERRIDES = [
    "data.train_batch_size=8",
    "data.max_response_length=64",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.rollout.ignore_eos=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32",
]


def train(python: Path, harness: Path, folder: Path, name: str) -> Parts:
    """Train once."""
    out = folder / name.replace(", ", "_").replace(" ", "_")
    steps = range(1, STEPS + 1)
    command = [
        "bash", harness / "run_verl.sh", "v0", f"+skip=rollout_{RUNS[name]}",
        f"skip.dump_dir={folder / 'dumps'}", *OVERRIDES,
    ]  # fmt: skip
    env = {"VENV": str(python.parents[1]), "ASSETS": str(folder), "STEPS": str(STEPS)}
    env |= {"OUT": str(out), "RAY_TMP": str(folder / "ray")}
    samples: list[tuple[int, float]] = []

    def note(cost: Cost, log: Path) -> None:
        samples.append((log.stat().st_size, cost.cpu_s))

    run(command, out, env, note)
    text = (out / "log").read_bytes()

    def cpu_at(mark: bytes) -> float:
        place = text.index(mark)
        return next(cpu for size, cpu in samples if size > place)

    mark = cpu_at(b"Training Progress")
    parts: Parts = {"start_up": mark, "generation": 0, "rest": 0}
    for step in steps:
        line = re.search(rb"step:%d - .*" % step, text)
        assert line
        seconds = dict(re.findall(rb"timing_s/(gen|step):([\d.e+-]+)", line[0]))
        share = float(seconds[b"gen"]) / float(seconds[b"step"])
        before, mark = mark, cpu_at(b"step:%d - " % step)
        parts["generation"] += (mark - before) * share
        parts["rest"] += (mark - before) * (1 - share)
    return parts


def plot(runs: dict[str, Parts], file: Path) -> None:
    """Draw a bar for each run."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 2.2), layout="constrained")
    names, begun = list(runs), [0.0] * len(runs)
    for part, colour in COLOURS.items():
        seconds = [parts[part] for parts in runs.values()]
        axes.barh(names, seconds, left=begun, color=colour, label=part.replace("_", "-"))
        begun = [x + y for x, y in zip(begun, seconds, strict=True)]
    for place, whole in enumerate(begun):
        axes.annotate(
            f" {whole:.0f} s",
            (whole, place),
            va="center",
            xytext=(2, 0),
            textcoords="offset points",
        )
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel(f"CPU seconds of {STEPS} steps of verl with vLLM")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def total(parts: Parts) -> float:
    return sum(parts.values())


def rows(runs: dict[str, Parts]) -> list[Row]:
    made, replayed, without = (runs[name] for name in RUNS)
    seconds = {
        "run_replayed": (total(replayed), total(made)),
        "run_no_engine": (total(without), total(made)),
        "generation_replayed": (replayed["generation"], made["generation"]),
        "start_up_no_engine": (without["start_up"], replayed["start_up"]),
    }
    return [Row(what, ours, "CPU s", peer) for what, (ours, peer) in seconds.items()]


def main() -> None:
    parser = of_harness(arguments(__doc__))
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the runs side by side")
    options = parser.parse_args()
    python, harness = options.python.absolute(), options.harness.absolute()
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:  # Ray's sockets: a short path
        folder = Path(temporary)
        run([python, harness / "make_assets.py", folder], folder)
        runs = {name: train(python, harness, folder, name) for name in RUNS}
    for name, parts in runs.items():
        print(f"{name:20}", *(f"{part} {s:6.1f}" for part, s in parts.items()))
    report(rows(runs), versions(), options.json)
    if options.plot is not None:
        plot(runs, options.plot)


if __name__ == "__main__":
    main()
