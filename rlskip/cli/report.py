"""`rlskip report`: the page about a run, and about the two that `rlskip compare` compares."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from rlskip._human import size
from rlskip.cli.screen import Answer, progress, put, writing
from rlskip.compare.sides import find_side
from rlskip.report.page import Page, Shown, Verdict, render
from rlskip.runs.figures import Counter
from rlskip.runs.opened import NoSuchPlaceError, Run

_CHECKED = 10.0  # seconds between two looks for new dumps


@attrs.frozen
class Output:
    """Where a page goes, and what it may hold: the options of the command."""

    html: Path
    max_mb: float
    success: float


def report(run: Run, out: Output) -> Answer:
    """Write the page about a run; it replaces a page that exists there."""
    counter = Counter(lambda dumps: progress(dumps, "reading"))
    return _answer(out.html, write_page([shown(run.name, run)], out, counter=counter))


def follow_run(
    run: Run, out: Output, *, as_json: bool, wait: Callable[[float], None] = time.sleep
) -> None:
    """Write the page again whenever the run has changed, until a KeyboardInterrupt."""
    counter, before = Counter(), None
    while True:
        now = [(dump.place, dump.written) for dump in run.dumps()]
        if now != before:
            page = write_page([shown(run.name, run)], out, counter=counter, follows=True)
            put(_answer(out.html, page), as_json)
            before = now
        wait(_CHECKED)


def shown(name: str, run: Run) -> Shown:
    """A run with what the newest job recorded that used it."""
    try:
        return Shown(name, run, find_side(str(run.directory), run.dump_dir))
    except NoSuchPlaceError:
        return Shown(name, run, None)


def write_page(
    sides: Sequence[Shown],
    out: Output,
    *,
    counter: Counter,
    verdict: Verdict | None = None,
    follows: bool = False,
) -> Page:
    """Write the page about one or two runs; raises RlskipError where it would be too large."""
    page = render(
        sides,
        counter=counter,
        success=out.success,
        max_bytes=int(out.max_mb * 1e6),
        verdict=verdict,
        follows=follows,
    )
    with writing(out.html) as temporary:
        temporary.write_bytes(page.html)
    return page


def _answer(out: Path, page: Page) -> Answer:
    data = {"file": str(out), "bytes": len(page.html), **attrs.asdict(page)}
    del data["html"]
    left = page.sessions - page.shown
    what = f"{page.steps} steps, {page.shown} sessions shown" + (
        f", {left} left out" if left else ""
    )
    return Answer(data, [f"{out}: {what}, {size(len(page.html))}"])
