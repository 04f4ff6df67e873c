"""`rlskip report`: one page about a run."""

from __future__ import annotations

from pathlib import Path

from rlskip._human import size
from rlskip.cli.screen import Answer, progress, text, writing
from rlskip.report.figures import look
from rlskip.report.page import render
from rlskip.runs.decoding import Decoder
from rlskip.runs.on_disk import NoSuchPlaceError, Run


def report(
    run: Run, out: Path, *, sessions: int, decoder: Decoder | None, timeline_dir: Path | None
) -> Answer:
    """Write the page to `out`; it replaces a page that exists there."""
    if timeline_dir is not None and not timeline_dir.is_dir():
        raise NoSuchPlaceError("no such directory", f"--timeline {timeline_dir}")
    made = look(run, sessions, decoder, timeline_dir, lambda dumps: progress(dumps, "reading"))
    content = render(made).encode("utf-8", "replace")
    with writing(out) as temporary:
        temporary.write_bytes(content)
    shown = sum(map(len, made.sample.values()))
    data = {
        "file": str(out),
        "bytes": len(content),
        "steps": made.steps_dumped,
        "hits": made.tally.hits,
        "misses": made.tally.misses,
        "seconds_saved": made.tally.seconds_saved,
        "sessions_counted": made.counted,
        "groups_counted": made.groups,
        "sessions_shown": shown,
        "timelines": [timeline.name for timeline in made.timelines],
    }
    what = f"{made.steps_dumped} steps, {shown} sessions shown"
    return Answer(data, [text(f"{out}: {what}, {size(len(content))}")])
