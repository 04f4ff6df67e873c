"""`rlskip prune`: remove old dumps by number or age; without --yes only list them."""

from __future__ import annotations

import contextlib
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import attrs
import typer

from rlskip._human import counted, size
from rlskip.cli.options import Dir, Json, Where, dump_dir
from rlskip.cli.screen import listing, progress, put
from rlskip.errors import ConfigError
from rlskip.runs.find import find_runs
from rlskip.runs.opened import Run
from rlskip.store import dump
from rlskip.store.layout import JOURNAL, as_step

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h|d|w)")
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@attrs.define
class Old:
    """The dumps of a step, a journal, or what is quarantined: why it goes, or what keeps it.

    `size` is in bytes on disk, `written` in seconds since the epoch.
    """

    run: str
    directory: str
    name: str
    paths: Sequence[Path]
    size: int
    written: float
    why: str = ""
    removed: bool = False
    kept: str | None = None


def prune(
    where: Where = None,
    directory: Dir = None,
    keep_last: Annotated[int | None, typer.Option(min=0, help="Dumps to keep per run.")] = None,
    older_than: Annotated[str | None, typer.Option(help="An age: 7d, 12h, 30min.")] = None,
    quarantined: Annotated[
        bool, typer.Option("--quarantined", help="Also quarantined dumps.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them.")] = False,
    as_json: Json = False,
) -> int:
    """Remove old dumps; list them without --yes.

    A step that a job generates is kept.
    """
    if keep_last is None and older_than is None and not quarantined:
        limits = "give --keep-last, --older-than or --quarantined"
        raise ConfigError("no limit is given", "prune", limits)
    if where is not None and directory is not None:
        raise ConfigError(f"{where} is given, too", "--dir", "name one directory")
    limit = 0.0 if older_than is None else time.time() - _seconds(older_than)
    chosen = choose(find_runs(dump_dir(where, directory)), keep_last, limit, quarantined)
    if not chosen:
        return put(as_json, [], ["nothing to remove"])
    for one in progress(chosen, "removing"):
        remove(one, really=yes)
    going = [one for one in chosen if one.kept is None]
    total = f"{counted(len(going), 'dump')}, {size(sum(one.size for one in going))}"
    last = f"removed {total}" if yes else f"would remove {total}; add --yes to remove them"
    data = [attrs.asdict(one, filter=lambda field, _: field.name != "paths") for one in chosen]
    failed = any("cannot" in (one.kept or "") for one in chosen)
    columns = {"run": "run", "dump": "name", ">size": "size", ">age": "written", "why": "why"}
    if len(going) < len(chosen):
        columns["kept"] = "kept"
    return put(as_json, data, [listing(data, columns), last], failed=failed)


def _seconds(given: str) -> float:
    match = _AGE.fullmatch(given.strip())
    if match is None:
        raise ConfigError(f"{given!r} is not an age", "--older-than", "write e.g. 7d, 12h, 30min")
    return float(match[1]) * _SECONDS[match[2]]


def choose(
    runs: Sequence[Run], keep_last: int | None, limit: float, quarantined: bool
) -> list[Old]:
    """The steps and journals that any of the limits selects, by run and age.

    `keep_last` steps of each run stay, the last written; what is older than `limit` goes.
    """
    chosen: list[Old] = []
    for run in runs:
        places, has_dump = run.places(), run.steps()
        paths = {str(step): [p.directory for p in places.get(step, ())] for step in has_dump}
        steps = sorted(_measured(run, paths), key=lambda one: one.written)
        journals = list(_measured(run, {path.name: [path] for path in run.journals()}))
        bad = {path.name: [path] for path in run.quarantine() if quarantined}
        for one in steps[: max(0, len(steps) - keep_last)] if keep_last is not None else ():
            one.why = f"not among the last {keep_last}"
        for one in (*steps, *journals):
            one.why = "too old" if one.written < limit else one.why
        chosen += [one for one in (*steps, *journals) if one.why]
        chosen += _measured(run, bad, "quarantined")
    return sorted(chosen, key=lambda one: (one.run, one.written))


def remove(old: Old, *, really: bool) -> None:
    """Remove it, or note the reason why it is kept; without `really` nothing is removed."""
    try:
        # Checked again for each step: a replay may have begun since.
        step = as_step(old.name.removesuffix(JOURNAL))
        if step is not None:
            old.kept = dump.in_use(Path(old.directory)).get(step)
        for path in reversed(old.paths) if really and old.kept is None else ():
            with contextlib.suppress(FileNotFoundError):  # another process was quicker
                if path.is_dir():
                    dump.remove(path, Path(old.directory))
                else:
                    path.unlink()
        old.removed = really and old.kept is None
    except OSError as error:
        old.kept = f"it cannot be removed: {error.strerror or error}"


def _measured(run: Run, named: Mapping[str, Sequence[Path]], why: str = "") -> Iterator[Old]:
    """What there is at some paths, by name; nothing of what was removed meanwhile."""
    for name, paths in named.items():
        found = []
        for path in paths:
            # A live run may be removing it, or a file in it.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                found += [file.lstat() for file in (path, *path.rglob("*"))]
        # What a directory holds counts, not the directory.
        files = [one for one in found if not stat.S_ISDIR(one.st_mode)]
        if found:
            when = max(one.st_mtime for one in files or found)
            nbytes = sum(one.st_size for one in files)
            yield Old(run.name, str(run.directory), name, paths, nbytes, when, why)
