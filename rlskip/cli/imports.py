"""`rlskip import`: dumps and samples of other programs into a dump_dir."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import attrs
import typer

from rlskip._human import size
from rlskip.cli.options import Dir, Json, dump_dir
from rlskip.cli.screen import progress, put, table
from rlskip.store.layout import safe_name


def import_rollouts(
    source: Annotated[Path, typer.Argument(help="A file, or a directory of files.")],
    directory: Dir = None,
    run: Annotated[
        str | None,
        typer.Option(help="The run to import into, e.g. exp_proj/GBS4_N2_in6_out8."),
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="If the path has none.")] = None,
    trust_pickle: Annotated[
        bool, typer.Option("--trust-pickle", help="Read pickles, of the types rollouts need.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Import rollouts of other programs."""
    from rlskip.interop.bounds import ForeignDumpError
    from rlskip.interop.content import Into
    from rlskip.interop.imports import find, import_files
    from rlskip.interop.train_dumps import import_train_dumps

    found = find(source, step)
    if any(form.is_pickle for _, form in found) and not trust_pickle:
        raise ForeignDumpError(
            f"{len(found)} dumps of {found[0][1].name}, which are pickles: a pickle can name any "
            "code",
            str(source),
            "if you trust their origin, add --trust-pickle; even then only the types that "
            "rollouts need are admitted",
        )
    into = Into(dump_dir(directory), f"{safe_name(source.stem)}_imported", run, step)
    rollouts = [one for one in found if one[1].read is not None]
    train_dumps = [file for file, form in found if form.read is None]
    done = [
        *import_files(progress(rollouts, "importing"), into),
        *import_train_dumps(progress(train_dumps, "importing"), into.dump_dir, run or into.name),
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
    return put(as_json, [attrs.asdict(one) for one in done], [shown])
