"""`rlskip prune`: remove old dumps by number or age; without --yes only list them."""

from __future__ import annotations

import re
from typing import Annotated

import attrs
import typer

from rlskip._human import size
from rlskip.cli.options import Dir, Json, Where, dump_dir
from rlskip.cli.screen import listing, progress, put
from rlskip.errors import ConfigError
from rlskip.runs.find import find_runs
from rlskip.runs.pruning import choose, remove

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h|d|w)")
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


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
    chosen = choose(
        find_runs(dump_dir(where or directory)),
        keep_last=keep_last,
        older_than=None if older_than is None else _seconds(older_than),
        quarantined=quarantined,
    )
    old = [remove(one, really=yes) for one in progress(chosen, "removing")]
    if not old:
        return put(as_json, [], ["nothing to remove"])
    going = [one for one in old if one.kept is None]
    total = f"{len(going)} dumps, {size(sum(one.size for one in going))}"
    last = f"removed {total}" if yes else f"would remove {total}; add --yes to remove them"
    data = [
        attrs.asdict(one, recurse=False, filter=lambda field, _: field.name != "paths")
        | {"run": one.run.name, "directory": str(one.run.directory)}
        for one in old
    ]
    failed = any(one.kept is not None and "cannot" in one.kept for one in old)
    columns = {"run": "run", "dump": "name", ">size": "size", ">age": "written", "why": "why"}
    if len(going) < len(old):
        columns["kept"] = "kept"
    return put(as_json, data, [listing(data, columns), last], failed=failed)


def _seconds(given: str) -> float:
    match = _AGE.fullmatch(given.strip())
    if match is None:
        raise ConfigError(f"{given!r} is not an age", "--older-than", "write e.g. 7d, 12h, 30min")
    return float(match[1]) * _SECONDS[match[2]]
