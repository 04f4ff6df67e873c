"""What rlskip costs when it has nothing to do.

startup_ms        start-up time that installing rlskip adds to a bare Hydra application
off_ns            time that the decorator adds to a call while its role is off
unlisted_ns       the same with the role on and a step that is not among the 128 listed ones
uninitialised_ns  the same before SkipManager.init
record_off_ns     time that rlskip.record takes while recording is off
first_hit_ms      processor time that comparing 50 arguments adds to the first hit of a run

Every figure is the difference of two best times, with rlskip minus without. Calls of a method with
one positional argument are measured in wall time. Whole processes are measured in processor time,
because a start-up waits for nothing and other processes do not disturb that clock. Rows that end
in _verl compare with verl 0.9.1's decorator in the same process; they have no peer where verl is
not installed. verl is imported without its plug-ins: rlskip's would replace that decorator.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from timeit import Timer
from typing import Any

from omegaconf import OmegaConf

import rlskip
from benchmarks._report import Goal, Row, arguments, best_of, report, versions
from rlskip import SkipManager
from rlskip.hosts.verl.handshake import PLUGIN, PLUGINS_VARIABLE

GOALS = {
    "startup_ms": 6,
    "off_ns": 200,
    "unlisted_ns": 600,
    "record_off_ns": 200,
    "first_hit_ms": 1,
}
STEPS = list(range(1, 129))
UNLISTED = 1000
CALLS = (
    2_000  # about a millisecond: short enough to fall between two time slices of other processes
)

APP = """
import hydra

@hydra.main(version_base=None, config_path=None)
def main(config):
    pass

main()
"""


# -- start-up ------------------------------------------------------------------------------
def startup_ms(rounds: int) -> float:
    """Return the processor milliseconds added to a bare Hydra application."""
    home = Path(rlskip.__file__).parents[1]
    if (home / "hydra").exists():
        raise SystemExit(f"{home} holds Hydra too, so rlskip cannot be hidden: pip install -e .")
    plug_in = "hydra_plugins/rlskip_plugin"
    elsewhere = [p for p in sys.path if Path(p).is_dir() and not Path(p, plug_in).exists()]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "app.py").write_text(APP, encoding="utf-8")

        def app(path: list[str], *options: str) -> str:
            # -S skips .pth files, which would put an editable rlskip back on the path.
            return subprocess.run(
                [sys.executable, "-S", "app.py", *options],
                cwd=folder,
                # The first start may keep compiled modules, as those of users do.
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path),
                    "PYTHONDONTWRITEBYTECODE": "",
                },
                check=True,
                capture_output=True,
                text=True,
            ).stdout

        with_it, without = [*elsewhere, str(home)], elsewhere
        assert "RlskipSearchPathPlugin" in app(with_it, "--info", "plugins")
        assert "Rlskip" not in app(without, "--info", "plugins")
        quiet = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=disabled")

        def cpu_ms(path: list[str]) -> float:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            app(path, *quiet)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e3

        pairs = [(cpu_ms(with_it), cpu_ms(without)) for _ in range(rounds)]
    return min(a for a, _ in pairs) - min(b for _, b in pairs)


# -- the decorator -------------------------------------------------------------------------
class Prompts:
    """The part of a batch that a decorator reads."""

    meta_info: dict[str, Any] = {}  # noqa: RUF012


def worker(decorate: Callable[[Any], Any]) -> Any:
    class Worker:
        @decorate
        def generate(self, prompts: Prompts) -> Prompts:
            return prompts

    return Worker()


def config(dump_dir: str, enable: bool) -> Any:
    """Return a config that both managers can read."""
    role = {"enable": enable, "steps": STEPS, "dump_dir": dump_dir, "action": "cache"}
    # verl reads a trainer mode even for a role that is off.
    trainer = {"v1": {"trainer_mode": "colocate_sync"}}
    return OmegaConf.create({"skip": {"rollout": role}, "trainer": trainer, "data": {}})


def added_ns(rounds: int) -> Iterator[tuple[str, float, float | None]]:
    """Yield per state its name, the nanoseconds that ours adds to a call, and those of verl's."""
    managers = [SkipManager]
    os.environ[PLUGINS_VARIABLE] = "none"
    try:
        from verl.utils.skip import SkipManager as verl_manager

        assert PLUGIN not in sys.modules, "verl's decorator is replaced by rlskip's"
        managers.append(verl_manager)
    except ImportError:
        pass
    workers = [worker(manager.annotate(role="rollout")) for manager in managers]
    timers = [
        Timer("generate(prompts)", globals={"generate": one.generate, "prompts": Prompts()})
        for one in [worker(lambda method: method), *workers]
    ]

    def measure() -> tuple[float, float | None]:
        bare, ours, *peer = best_of(rounds, *(lambda t=t: t.timeit(CALLS) for t in timers))
        added = [(seconds - bare) / CALLS * 1e9 for seconds in (ours, *peer)]
        return added[0], added[1] if peer else None

    def state(enable: bool) -> None:
        for manager in managers:
            manager.init(config(dump_dir, enable))
            manager.set_step(UNLISTED)

    with tempfile.TemporaryDirectory() as dump_dir:
        yield "uninitialised", *measure()
        state(enable=False)
        yield "off", *measure()
        state(enable=True)
        yield "unlisted", *measure()
        SkipManager.reset()


def record_off_ns(rounds: int) -> float:
    """Return the nanoseconds of a call that records nothing."""
    names = {"rlskip": rlskip, "value": 1.0}
    called = Timer("rlskip.record('loss', value, rows=None)", globals=names)
    (seconds,) = best_of(rounds, lambda: called.timeit(CALLS))
    return seconds / CALLS * 1e9


def first_hit_ms(rounds: int) -> float:
    """Return the processor milliseconds that 50 compared arguments add to a run's first hit."""
    values = [7, 0.5, "a text", [1, 2, 3], {"a": {"b": 1}}]
    given = {f"argument_{i}": values[i % len(values)] for i in range(50)}
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(f"def generate(prompts, {', '.join(given)}): return [1]", namespace)

    def hit(ignore: list[str], dump_dir: str) -> float:
        generate = SkipManager.annotate(role="rollout", ignore=ignore)(namespace["generate"])
        SkipManager.init({"skip": {"dump_dir": dump_dir, "rollout": {"enable": True}}})
        SkipManager.set_step(1)
        began = time.process_time()
        generate([1], **given)
        return (time.process_time() - began) * 1e3

    with tempfile.TemporaryDirectory() as compared, tempfile.TemporaryDirectory() as ignored:
        pairs = [(hit([], compared), hit(["*"], ignored)) for _ in range(rounds)]
        SkipManager.reset()
    # The first of each generates.
    return min(a for a, _ in pairs[1:]) - min(b for _, b in pairs[1:])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--rounds",
        type=int,
        default=20,
        help="best of so many (default: 20)",
    )
    options = parser.parse_args()

    rows = [Row("startup_ms", startup_ms(options.rounds), "ms", goal=goal("startup_ms"))]
    # Many short rounds: one undisturbed round is enough.
    for name, ours, verl in added_ns(20 * options.rounds):
        rows += [
            Row(f"{name}_ns", ours, "ns", goal=goal(f"{name}_ns")),
            Row(f"{name}_ns_verl", ours, "ns", peer=verl),
        ]
    off = record_off_ns(20 * options.rounds)
    rows.append(Row("record_off_ns", off, "ns", goal=goal("record_off_ns")))
    hit = first_hit_ms(5 * options.rounds)
    rows.append(Row("first_hit_ms", hit, "ms", goal=goal("first_hit_ms")))
    report(rows, versions("hydra-core", "verl"), options.json)


def goal(what: str) -> Goal | None:
    return Goal("<=", GOALS[what]) if what in GOALS else None


if __name__ == "__main__":
    main()
