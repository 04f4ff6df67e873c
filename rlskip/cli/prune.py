"""`rlskip prune`: remove old dumps, by number, age or size; only told unless --yes."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable
from pathlib import Path

import attrs

from rlskip.cli.dumps import Run, find_runs
from rlskip.cli.screen import Answer, age, progress, size, table, text
from rlskip.config.skip import parse_size
from rlskip.errors import ConfigError
from rlskip.store import commit

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h|d|w)")
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@attrs.frozen
class Old:
    """A step's dump, or one that was set aside, and why it is to go (or what spares it)."""

    run: Run
    name: str
    size: int
    written: float
    why: str
    removed: bool = False
    spared: str | None = None


@attrs.frozen
class _Step:
    run: Run
    name: str
    size: int
    written: float


def prune(
    where: Path,
    *,
    keep_last: int | None,
    older_than: str | None,
    max_size: str | None,
    set_aside: bool,
    yes: bool,
) -> Answer:
    """Choose by any of the limits; remove with `yes`.

    Parameters
    ----------
    keep_last
        Dumps to keep in each run, the last written.
    older_than
        ``7d``, ``12h``, ``30min``: what was written longer ago goes.
    max_size
        What all the runs below `where` may take together; the oldest go first.
    set_aside
        Also what was set aside as bad.
    """
    if keep_last is None and older_than is None and max_size is None and not set_aside:
        raise ConfigError(
            "nothing says what is old", "prune",
            "give --keep-last, --older-than, --max-size or --set-aside",
        )  # fmt: skip
    runs = find_runs(where)
    steps = [step for run in runs for step in _steps(run)]
    chosen: dict[tuple[Path, str], Old] = {}

    def choose(some: Iterable[_Step], why: str) -> None:
        for step in some:
            key = (step.run.directory, step.name)
            chosen.setdefault(key, Old(step.run, step.name, step.size, step.written, why))

    if set_aside:
        choose((_measured(run, path) for run in runs for path in run.set_aside()), "set aside")
    if older_than is not None:
        limit = time.time() - _seconds(older_than)
        choose((s for s in steps if s.written < limit), f"older than {older_than}")
    if keep_last is not None:
        for run in runs:
            mine = sorted((s for s in steps if s.run == run), key=lambda s: s.written)
            choose(mine[: max(0, len(mine) - keep_last)], f"not the last {keep_last}")
    if max_size is not None:
        room = _bytes(max_size)
        for step in sorted(steps, key=lambda s: -s.written):
            if (step.run.directory, step.name) not in chosen:
                room -= step.size
                if room < 0:
                    choose([step], f"beyond {max_size}")
    old = sorted(chosen.values(), key=lambda o: (o.run.name, o.written))
    return _answer([_spare_or_remove(o, yes) for o in progress(old, "removing")], yes)


def _spare_or_remove(old: Old, yes: bool) -> Old:
    # Asked anew for each: a replay may have begun since.
    if old.name.isdigit() and int(old.name) in commit.being_read(old.run.directory):
        return attrs.evolve(old, spared="it is being read")
    if yes:
        with contextlib.suppress(FileNotFoundError):  # another was quicker
            commit.remove(old.run.directory / old.name, old.run.directory)
    return attrs.evolve(old, removed=yes)


def _answer(old: list[Old], yes: bool) -> Answer:
    shown = table("run", "dump", ">size", ">age", "why")
    for one in old:
        why = one.why if one.spared is None else f"{one.why}; kept: {one.spared}"
        shown.add_row(text(one.run.name), one.name, size(one.size), age(one.written), text(why))
    going = [one for one in old if one.spared is None]
    total = f"{len(going)} dumps, {size(sum(one.size for one in going))}"
    last = f"removed {total}" if yes else f"would remove {total}; nothing was: add --yes"
    data = [
        {
            **attrs.asdict(one, recurse=False),
            "run": one.run.name,
            "directory": str(one.run.directory),
        }
        for one in old
    ]
    return Answer(data, [shown, text(last)] if old else [text("nothing to remove")])


def _steps(run: Run) -> list[_Step]:
    return [_measured(run, run.directory / str(step)) for step in run.steps()]


def _measured(run: Run, path: Path) -> _Step:
    found = []
    for file in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found.append(file.lstat())
    with contextlib.suppress(FileNotFoundError):
        found = found or [path.lstat()]
    written = max((f.st_mtime for f in found), default=0.0)
    return _Step(run, path.name, sum(f.st_size for f in found), written)


def _seconds(given: str) -> float:
    match = _AGE.fullmatch(given.strip())
    if match is None:
        raise ConfigError(f"{given!r} is no age", "--older-than", "write e.g. 7d, 12h, 30min")
    return float(match[1]) * _SECONDS[match[2]]


def _bytes(given: str) -> int:
    problems: list = []
    found = parse_size(int(given) if given.isdigit() else given, "--max-size", problems)
    if found is None:
        raise ConfigError(f"{given!r} is no size", "--max-size", "write bytes, or e.g. 200GB")
    return found
