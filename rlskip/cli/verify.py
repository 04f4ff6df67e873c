"""`rlskip verify`: every byte of every dump compared with its checksum."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlskip._human import size
from rlskip.cli.screen import Answer, progress, table, text
from rlskip.format.dump_errors import AbsentDumpError
from rlskip.runs.find import Target
from rlskip.runs.opened import NoSuchPlaceError


def verify(targets: Sequence[Target], where: Path) -> Answer:
    """Verify all dumps of `targets`; nothing is changed. Exit code 1 if a dump is unusable.

    Raises NoSuchPlaceError if there is none; `where` is what was looked through.
    """
    dumps = [(target.run.name, dump) for target in targets for dump in target.dumps()]
    if not dumps:
        names = ", ".join(dict.fromkeys(target.run.name for target in targets))
        raise NoSuchPlaceError("there are no dumps to verify", names or str(where))
    found: list[dict[str, Any]] = []
    for run, dump in progress(dumps, "verifying"):
        with contextlib.suppress(AbsentDumpError):  # a live run's keep_last was quicker
            problem = dump.verify()
            found.append({"run": run, "dump": dump.name, "size": dump.size, "problem": problem})
    bad = [
        (one["run"], one["dump"], text(one["problem"], "red")) for one in found if one["problem"]
    ]
    total = f"{len(found) - len(bad)} of {len(found)} dumps are sound"
    if gone := len(dumps) - len(found):
        total += f"; {gone} were removed meanwhile"
    shown = [table(("run", "step", "problem"), bad)] if bad else []
    read = size(sum(one["size"] for one in found))
    return Answer(found, [*shown, f"{total} ({read} read)"], exit_code=1 if bad else 0)
