"""`rlskip verify`: every byte of every dump compared with its checksum."""

from __future__ import annotations

import attrs

from rlskip.cli.dumps import Dump, Target
from rlskip.cli.screen import Answer, progress, size, table, text
from rlskip.store import DumpError


@attrs.frozen
class Verdict:
    """Of one dump; `problem` is None where it is sound."""

    run: str
    dump: str
    size: int
    problem: str | None


def verify(targets: list[Target]) -> Answer:
    """Nothing is set aside or changed. Exit code 1 where a dump is unusable."""
    dumps = [(target.run.name, dump) for target in targets for dump in target.dumps()]
    verdicts = [
        Verdict(run, dump.name, dump.size, _problem(dump))
        for run, dump in progress(dumps, "verifying")
    ]
    bad = [verdict for verdict in verdicts if verdict.problem]
    total = f"{len(verdicts) - len(bad)} of {len(verdicts)} dumps are sound"
    view = [text(f"{total} ({size(sum(v.size for v in verdicts))} read)")]
    if bad:
        shown = table("run", "step", "problem")
        for verdict in bad:
            shown.add_row(text(verdict.run), verdict.dump, text(verdict.problem, "red"))
        view.insert(0, shown)  # type: ignore[arg-type]
    return Answer([attrs.asdict(v) for v in verdicts], view, exit_code=1 if bad else 0)


def _problem(dump: Dump) -> str | None:
    try:
        dump.verify()
    except DumpError as error:
        return error.what
    except OSError as error:
        return str(error)
    return None
