"""`rlskip report`: the page about a run, and about the two that `rlskip compare` compares."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlskip._human import counted, size
from rlskip.batch.decoding import Decode
from rlskip.cli.options import Dir, Json, MaxMb, Success, Tokenizer, Where, decoder, dump_dir
from rlskip.cli.screen import progress, put, writing
from rlskip.runs.find import the_run
from rlskip.runs.opened import NoSuchPlaceError

if TYPE_CHECKING:
    from rlskip.compare.sides import Dumps, Side


def report(
    where: Where = None,
    html: Annotated[Path, typer.Option(help="The page to write.")] = Path("rlskip.html"),
    directory: Dir = None,
    max_mb: MaxMb = 5.0,
    success: Success = 0.5,
    tokenizer: Tokenizer = None,
    as_json: Json = False,
) -> int:
    """Write a page about a run."""
    from rlskip.report.page import render

    page, counts = render(
        [_found(where, directory, decoder(tokenizer))],
        success=success,
        max_bytes=int(max_mb * 1e6),
        progress=lambda dumps: progress(dumps, "reading"),
    )
    with writing(html) as temporary:
        temporary.write_bytes(page)
    data = {"file": str(html), "bytes": len(page), **counts}
    left = counts["sessions"] - counts["shown"]
    what = f"{counted(counts['steps'], 'step')}, {counted(counts['shown'], 'session')} shown"
    what += f", {left} left out" if left else ""
    return put(as_json, data, [f"{html}: {what}, {size(len(page))}"])


def _found(where: str | None, directory: str | None, decode: Decode | None) -> Side | Dumps:
    """What a user names: a run, a dump_dir, or what `compare` takes beside them."""
    from rlskip.compare.sides import Dumps, find_side

    place = dump_dir(where, directory)
    try:
        run = the_run(place.resolve(), decode)
        return Dumps(run.name, run)
    except NoSuchPlaceError as error:
        with contextlib.suppress(NoSuchPlaceError):
            return find_side(str(where or place), dump_dir(directory), decode)
        raise error
