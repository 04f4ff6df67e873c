"""`rlskip verify`: every byte of every dump compared with its checksum."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

import typer

from rlskip._human import size
from rlskip.cli.options import Dir, Json, dump_dir
from rlskip.cli.screen import listing, progress, put
from rlskip.format.dump_errors import AbsentDumpError
from rlskip.runs.find import find_runs, find_target
from rlskip.runs.opened import NoSuchPlaceError


def verify(
    what: Annotated[
        list[str] | None, typer.Argument(help="Steps or paths; default: all in --dir.")
    ] = None,
    directory: Dir = None,
    as_json: Json = False,
) -> int:
    """Compare every byte with its checksum.

    Nothing is changed. Exit code 1 if a dump is unusable.
    """
    where = dump_dir(directory)
    targets = [find_target(name, where) for name in what] if what else find_runs(where)
    dumps = [(target.run.name, dump) for target in targets for dump in target.dumps()]
    if not dumps:
        names = ", ".join(dict.fromkeys(target.run.name for target in targets))
        raise NoSuchPlaceError("there are no dumps to verify", names or str(where))
    found: list[dict[str, Any]] = []
    for run, dump in progress(dumps, "verifying"):
        with contextlib.suppress(AbsentDumpError):  # a live run's keep_last was quicker
            problem = dump.verify()
            found.append({"run": run, "dump": dump.name, "size": dump.size, "problem": problem})
    bad = [one for one in found if one["problem"]]
    sound = "dumps are sound" if len(found) != 1 else "dump is sound"
    total = f"{len(found) - len(bad)} of {len(found)} {sound}"
    if gone := len(dumps) - len(found):
        total += f"; removed meanwhile: {gone}"
    shown = [listing(bad, {"run": "run", "step": "dump", "problem": "problem"})] if bad else []
    read = size(sum(one["size"] for one in found))
    return put(as_json, found, [*shown, f"{total} ({read} read)"], failed=bad)
