"""`rlskip import`: dumps and samples of other programs into a dump_dir."""

from __future__ import annotations

from pathlib import Path

import attrs

from rlskip._human import size
from rlskip.cli.screen import Answer, progress, table
from rlskip.interop.bounds import ForeignDumpError
from rlskip.interop.content import Into
from rlskip.interop.imports import find, import_files
from rlskip.interop.train_dumps import import_train_dumps
from rlskip.store.layout import safe_name


def import_(
    source: Path, dump_dir: Path, *, run: str | None, step: int | None, trust_pickle: bool
) -> Answer:
    """Import what is at or below `source`; pickles are refused without `trust_pickle`."""
    found = find(source, step)
    if any(form.is_pickle for _, form in found) and not trust_pickle:
        raise ForeignDumpError(
            f"{len(found)} dumps of {found[0][1].name}, which are pickles: a pickle can name any "
            "code",
            str(source),
            "if you trust their origin, add --trust-pickle; even then only the types that "
            "rollouts need are admitted",
        )
    into = Into(dump_dir, f"{safe_name(source.stem)}_imported", run, step)
    rollouts = [one for one in found if one[1].read is not None]
    train_dumps = [file for file, form in found if form.read is None]
    done = [
        *import_files(progress(rollouts, "importing"), into),
        *import_train_dumps(progress(train_dumps, "importing"), dump_dir, run or into.name),
    ]
    rows = [
        (
            one.step if one.part is None else f"{one.step}/{one.part}",
            one.role,
            one.rows,
            "exists already" if one.nbytes is None else size(one.nbytes),
            one.run,
        )
        for one in done
    ]
    shown = table((">step", "role", ">rows", ">in memory", "into run"), rows)
    return Answer([attrs.asdict(one) for one in done], [shown])
