"""`rlskip import`: verl's own dumps into a dump_dir."""

from __future__ import annotations

from pathlib import Path

import attrs

from rlskip._human import size
from rlskip.cli.screen import Answer, progress, table, text
from rlskip.interop.bounds import ForeignDumpError
from rlskip.interop.from_verl import find, import_dumps


def import_(
    source: Path, dump_dir: Path, *, run: str | None, step: int | None, trust_pickle: bool
) -> Answer:
    """Import the dumps of verl at or below `source`; refused without `trust_pickle`."""
    found = find(source, run, step)
    if not trust_pickle:
        raise ForeignDumpError(
            f"{len(found)} dumps of verl, which are pickles: a pickle can name any code",
            str(source),
            "if you trust their origin, add --trust-pickle; even then only the types that "
            "rollouts need are admitted",
        )
    done = list(import_dumps(progress(found, "importing"), dump_dir))
    shown = table(">step", "role", ">rows", ">in memory", "into run")
    for one in done:
        name = str(one.step) if one.part is None else f"{one.step}/{one.part}"
        stored = "exists already" if one.nbytes is None else size(one.nbytes)
        shown.add_row(name, one.role, str(one.rows), stored, text(one.run))
    return Answer([attrs.asdict(one) for one in done], [shown])
