"""`rlskip import`: dumps and samples of other programs into a dump_dir."""

from __future__ import annotations

from pathlib import Path

import attrs

from rlskip._human import size
from rlskip.cli.screen import Answer, progress, table
from rlskip.interop import samples
from rlskip.interop.bounds import ForeignDumpError
from rlskip.interop.from_verl import find, import_dumps
from rlskip.interop.train_dumps import import_train_dumps
from rlskip.store.layout import safe_name


def import_(
    source: Path, dump_dir: Path, *, run: str | None, step: int | None, trust_pickle: bool
) -> Answer:
    """Import what is at or below `source`; pickles are refused without `trust_pickle`."""
    others = samples.find(source)
    if others:
        if any(form.is_pickle for _, form in others) and not trust_pickle:
            raise _untrusted(f"{len(others)} files of {others[0][1].name}", source)
        name = f"{safe_name(source.stem)}_imported"
        rollouts = [one for one in others if one[1].read is not None]
        dumps = [file for file, form in others if form.read is None]
        of_run = run or f"{name}/GBSany_Nany_inany_outany"
        files = progress(rollouts, "importing")
        done = list(samples.import_samples(files, dump_dir, of_run, step))
        done += import_train_dumps(progress(dumps, "importing"), dump_dir, run or name)
    else:
        found = find(source, run, step)
        if not trust_pickle:
            raise _untrusted(f"{len(found)} dumps of verl", source)
        done = list(import_dumps(progress(found, "importing"), dump_dir))
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


def _untrusted(what: str, source: Path) -> ForeignDumpError:
    return ForeignDumpError(
        f"{what}, which are pickles: a pickle can name any code",
        str(source),
        "if you trust their origin, add --trust-pickle; even then only the types that "
        "rollouts need are admitted",
    )
