"""What all benchmarks share: timing, the description of the machine, the table, the JSON rows."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs

import rlskip

_COMPARE = {"<=": float.__le__, ">=": float.__ge__}


@attrs.frozen
class Goal:
    """A limit, e.g. ``Goal("<=", 30)``."""

    op: str = attrs.field(validator=attrs.validators.in_(_COMPARE))
    value: float = attrs.field(converter=float)

    def met_by(self, figure: float) -> bool:
        return _COMPARE[self.op](float(figure), self.value)


@attrs.frozen
class Row:
    """One measured figure. With a peer the goal applies to ours/peer, otherwise to ours."""

    what: str
    ours: float
    unit: str
    peer: float | None = None
    goal: Goal | None = None

    @property
    def ratio(self) -> float | None:
        return None if self.peer is None else self.ours / self.peer

    @property
    def met(self) -> bool | None:
        figure = self.ours if self.ratio is None else self.ratio
        return None if self.goal is None else self.goal.met_by(figure)

    def as_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "ours": self.ours,
            "peer": self.peer,
            "unit": self.unit,
            "ratio": self.ratio,
            "goal": None if self.goal is None else attrs.asdict(self.goal),
            "met": self.met,
        }


def best_of(rounds: int, *functions: Callable[[], Any]) -> list[float]:
    """Return the best wall time in seconds of each function over `rounds` rounds.

    The functions take turns within a round, so that a slow phase of the machine affects all.
    """
    best = [float("inf")] * len(functions)
    for _ in range(rounds):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def machine() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [s for s in cpuinfo.read_text().splitlines() if s.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    return f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"


def versions(*packages: str) -> dict[str, str]:
    found = {"python": platform.python_version(), "rlskip": rlskip.__version__}
    installed = {dist.name.lower(): dist.version for dist in metadata.distributions()}
    for package in ("torch", "numpy", *packages):
        found[package] = installed.get(package.lower(), "not installed")
    return found


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that has the option ``--json``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    return parser


def report(rows: Iterable[Row], versions: dict[str, str], json_file: Path | None) -> None:
    """Print the table, missed goals first, and write the JSON rows if requested."""
    rows = sorted(rows, key=lambda row: row.met is not False)
    print(f"{machine()}\n{', '.join(f'{k} {v}' for k, v in versions.items())}\n")
    line = "{:<34}{:>13}{:>13} {:<8}{:>10}{:>12}  {}"
    print(line.format("what", "ours", "peer", "unit", "ratio", "goal", ""))
    for row in rows:
        print(
            line.format(
                row.what,
                f"{row.ours:.4g}",
                "" if row.peer is None else f"{row.peer:.4g}",
                row.unit,
                "" if row.ratio is None else f"{row.ratio:.4g}",
                "" if row.goal is None else f"{row.goal.op} {row.goal.value:.4g}",
                {True: "met", False: "MISSED", None: ""}[row.met],
            ).rstrip()
        )
    if json_file is not None:
        payload = {
            "machine": machine(),
            "versions": versions,
            "rows": [row.as_json() for row in rows],
        }
        json_file.write_text(json.dumps(payload, indent=2) + "\n")
