"""`rlskip verify`: every byte of every dump compared with its checksum."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import attrs
from rich.console import RenderableType

from rlskip._human import size
from rlskip.cli.screen import Answer, progress, table, text
from rlskip.format.dump_errors import AbsentDumpError
from rlskip.runs.find import Target
from rlskip.runs.opened import NoSuchPlaceError


@attrs.frozen
class Verdict:
    """The verdict on one dump; `problem` is None if it is sound."""

    run: str
    dump: str
    size: int
    problem: str | None


def verify(targets: Sequence[Target], where: Path) -> Answer:
    """Verify all dumps of `targets`; nothing is changed. Exit code 1 if a dump is unusable.

    Raises NoSuchPlaceError if there is none; `where` is what was looked through.
    """
    dumps = [(target.run.name, dump) for target in targets for dump in target.dumps()]
    if not dumps:
        names = ", ".join(dict.fromkeys(target.run.name for target in targets))
        raise NoSuchPlaceError("there are no dumps to verify", names or str(where))
    verdicts = []
    for run, dump in progress(dumps, "verifying"):
        with contextlib.suppress(AbsentDumpError):  # a live run's keep_last was quicker
            verdicts.append(Verdict(run, dump.name, dump.size, dump.verify()))
    bad = [verdict for verdict in verdicts if verdict.problem]
    total = f"{len(verdicts) - len(bad)} of {len(verdicts)} dumps are sound"
    view: list[RenderableType] = []
    if bad:
        shown = table("run", "step", "problem")
        for verdict in bad:
            shown.add_row(text(verdict.run), verdict.dump, text(verdict.problem, "red"))
        view.append(shown)
    if gone := len(dumps) - len(verdicts):
        total += f"; {gone} were removed meanwhile"
    view.append(text(f"{total} ({size(sum(v.size for v in verdicts))} read)"))
    return Answer([attrs.asdict(v) for v in verdicts], view, exit_code=1 if bad else 0)
