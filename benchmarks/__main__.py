"""Run every benchmark, and write RESULTS.md, results.png and the pictures of the docs.

With `--only`, the other benchmarks keep the figures that were measured last (results.json).
Results are written after each benchmark, so a failure does not lose the earlier ones.

Each benchmark runs in its own process, together with the genuine peer. The environment needs
rlskip with its extras `ray`, `benchmarks` and `data`, and verl 0.9.1: `.ci/env benchmarks`.
SkyRL 0.3.0 is read from its wheel (`--wheel`), because its package needs Python 3.12. The
benchmarks `engine` and `verl_steps` need vLLM in another environment, so they are run where
$RLSKIP_VLLM and $RLSKIP_VLLM_HARNESS are set; `gpu` needs one, and TRL in place of verl.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks._report import arguments

HERE = Path(__file__).parent
TEMPLATE = """\
# Results

{met} of {goals} goals met. Missed ones come first; rows without a goal last.

`python -m benchmarks` made this page. Ours and the peer ran in the same process, and each figure is
the best of several rounds. There are exceptions: step_time, engine, verl_steps and gpu compare
whole trainings, and trial compares each stage with the work that it cannot avoid; these run once.
The ratio is ours over the peer's. A goal applies to the ratio where there is a peer, otherwise to
our figure.
`python -m benchmarks.NAME --help` explains each row.

![How far each figure is from its goal](results.png)

| benchmark | what | ours | peer | unit | ratio | goal | |
|---|---|---:|---:|---|---:|---|---|
{lines}

{measured}
"""
# The pictures in the docs come from the same run.
PLOTS = {
    "dispatch": "makespan.png",
    "step_time": "step_time.png",
    "verl_steps": "verl_steps.png",
}
ON_VLLM = ("engine", "verl_steps")
ELSEWHERE = (*ON_VLLM, "gpu")
NAMES = (
    "overhead",
    "caches",
    "store",
    "dispatch",
    "replay",
    "merge",
    "open",
    "commands",
    "step_time",
    "trial",
    *ELSEWHERE,
)


def run(name: str, wheel: Path | None, pictures: Path) -> dict[str, Any]:
    """Run one benchmark; returns its machine, versions and rows."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "rows.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(found)]
        if name in PLOTS:
            command += ["--plot", str(pictures.resolve() / PLOTS[name])]
        if name == "merge" and wheel is not None:
            command += ["--wheel", str(wheel)]
        print(f"\n== {name}", flush=True)
        subprocess.run(command, check=True, cwd=HERE.parent)
        results: dict[str, Any] = json.loads(found.read_text())
    return {"date": f"{date.today():%Y-%m-%d}", **results}


def figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def line(name: str, row: dict[str, Any]) -> str:
    goal = "" if row["goal"] is None else f"{row['goal']['op']} {row['goal']['value']:.4g}"
    verdict = {True: "met", False: "**MISSED**", None: ""}[row["met"]]
    cells = [name, f"`{row['what']}`", figure(row["ours"]), figure(row["peer"]), row["unit"]]
    return "| " + " | ".join([*cells, figure(row["ratio"]), goal, verdict]) + " |"


def as_markdown(results: dict[str, dict[str, Any]]) -> str:
    """Return the table of all rows: missed goals first, rows without a goal last."""
    rows = [(name, row) for name, found in results.items() for row in found["rows"]]
    rows.sort(key=lambda pair: (pair[1]["met"] is not False, pair[1]["goal"] is None))
    goals = [row["met"] for _, row in rows if row["met"] is not None]
    return TEMPLATE.format(
        met=sum(goals),
        goals=len(goals),
        lines="\n".join(line(name, row) for name, row in rows),
        measured="\n".join(map(measured, results.items())),
    )


def measured(benchmark: tuple[str, dict[str, Any]]) -> str:
    """Return when, where and with which versions a benchmark ran."""
    name, found = benchmark
    versions = [f"{k} {v}" for k, v in found["versions"].items() if v != "not installed"]
    return f"- {name}: {found['date']}, {found['machine']}; {', '.join(versions)}"


def plot(results: dict[str, dict[str, Any]], file: Path) -> None:
    """Draw one bar per goal: how far the figure is from its limit, on a logarithmic axis."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    bars = []
    for name, found in results.items():
        for row in found["rows"]:
            if row["goal"] is not None:
                value = row["ours"] if row["ratio"] is None else row["ratio"]
                limit = row["goal"]["value"]
                # A difference of two times may be below 0.
                value = max(value, limit / 100)
                room = limit / value if row["goal"]["op"] == "<=" else value / limit
                bars.append((f"{name}  {row['what']}", room, row["met"]))
    bars.sort(key=lambda bar: bar[1], reverse=True)
    figure, axes = plt.subplots(figsize=(8, 0.32 * len(bars) + 1.2), layout="constrained")
    for y, (_, room, met) in enumerate(bars):
        axes.barh(y, room - 1, left=1, color="#1f6fb4" if met else "#c8443a", height=0.62)
        axes.annotate(
            f"{room:.3g}x", (room, y), va="center", ha="left" if room >= 1 else "right",
            xytext=(4 if room >= 1 else -4, 0), textcoords="offset points", fontsize=8, color="0.3",
        )  # fmt: skip
    axes.axvline(1, color="0.3", linewidth=1)
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars], fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(min(0.5, *(0.6 * bar[1] for bar in bars)), 1.6 * max(bar[1] for bar in bars))
    axes.set_xticks([0.5, 1, 2, 5, 10], ["0.5x", "1x", "2x", "5x", "10x"])
    axes.minorticks_off()
    axes.set_xlabel("times better than the goal (left of the line: missed)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.set_ylim(-0.8, len(bars) - 0.2)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = arguments(__doc__)
    runnable = [name for name in NAMES if name not in ELSEWHERE]
    runnable += ON_VLLM if "RLSKIP_VLLM" in os.environ else ()
    parser.add_argument("--only", nargs="+", choices=NAMES, default=runnable, metavar="NAME")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="of SkyRL 0.3.0, for merge")
    parser.add_argument("--out", type=Path, default=HERE, metavar="DIR", help="where to write")
    options = parser.parse_args()
    pictures = HERE.parent / "docs" if options.out == HERE else options.out
    kept = options.out / "results.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    for name in options.only:
        results[name] = run(name, options.wheel, pictures)
        results = {name: results[name] for name in NAMES if name in results}
        kept.write_text(json.dumps(results, indent=2) + "\n")
        (options.out / "RESULTS.md").write_text(as_markdown(results), encoding="utf-8")
    if options.json is not None:
        options.json.write_text(kept.read_text())
    plot(results, options.out / "results.png")
    print(f"\n{options.out / 'RESULTS.md'} and results.png")


if __name__ == "__main__":
    main()
