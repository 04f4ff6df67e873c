"""`rlskip report`: the page about a run, and about the two that `rlskip compare` compares."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from rlskip._human import size
from rlskip.cli.options import Dir, Json, MaxMb, Success, Tokenizer, Where, decoder, dump_dir
from rlskip.cli.screen import progress, put, writing
from rlskip.runs.find import the_run
from rlskip.runs.opened import NoSuchPlaceError, Run

if TYPE_CHECKING:
    from rlskip.report.page import Page, Shown

_CHECKED = 10.0  # seconds between two looks for new dumps


def report(
    where: Where = None,
    html: Annotated[Path, typer.Option(help="The page to write.")] = Path("rlskip.html"),
    directory: Dir = None,
    max_mb: MaxMb = 5.0,
    success: Success = 0.5,
    tokenizer: Tokenizer = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Write it again while the run goes on, until Ctrl-C.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Write a page about a run."""
    from rlskip.report.page import render
    from rlskip.runs.figures import Counter

    run = the_run(dump_dir(where or directory).resolve(), decoder(tokenizer))
    counter, before = Counter(iter if follow else lambda dumps: progress(dumps, "reading")), None
    while True:
        now = [(dump.place, dump.written) for dump in run.dumps()] if follow else []
        if now != before:
            page = render(
                [shown(run.name, run)],
                counter=counter,
                success=success,
                max_bytes=int(max_mb * 1e6),
                follows=follow,
            )
            write(page, html)
            _tell(page, html, as_json)
            before = now
        if not follow:
            return 0
        time.sleep(_CHECKED)


def shown(name: str, run: Run) -> Shown:
    """A run with what the newest job recorded that used it."""
    from rlskip.compare.sides import find_side
    from rlskip.report.page import Shown

    try:
        return Shown(name, run, find_side(str(run.directory), run.dump_dir))
    except NoSuchPlaceError:
        return Shown(name, run, None)


def write(page: Page, out: Path) -> None:
    """Write the page; it replaces one that exists there."""
    with writing(out) as temporary:
        temporary.write_bytes(page.html)


def _tell(page: Page, out: Path, as_json: bool) -> None:
    data = {"file": str(out), "bytes": len(page.html), **attrs.asdict(page)}
    del data["html"]
    left = page.sessions - page.shown
    what = f"{page.steps} steps, {page.shown} sessions shown" + (
        f", {left} left out" if left else ""
    )
    put(as_json, data, [f"{out}: {what}, {size(len(page.html))}"])
