"""`rlskip rescore`: a reward function run over cached rollouts, without a trainer."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlskip._human import counted, short
from rlskip.cli.options import Dir, Json, Target, Tokenizer, decoder, dump_dir
from rlskip.cli.screen import Cell, listing, progress, put, text
from rlskip.config.steps import Steps, compact
from rlskip.errors import ConfigError
from rlskip.runs.find import find_target
from rlskip.runs.opened import NoSuchPlaceError, Run, Scope

if TYPE_CHECKING:
    from rlskip.rescore.judge import Judge

_NAMED = 10  # groups of a line


def rescore(
    what: Target,
    reward: Annotated[str, typer.Option(help="The function: package.module:name.")],
    directory: Dir = None,
    steps: Annotated[str, typer.Option(help="Steps to score: 3, 1-10, all.")] = "all",
    workers: Annotated[int, typer.Option(min=1, help="Calls that are under way at a time.")] = 8,
    tokenizer: Tokenizer = None,
    data: Annotated[
        Path | None, typer.Option(help="The data set, for columns that the run lacks.")
    ] = None,
    version: Annotated[
        str | None, typer.Option(help="The function's version: keeps its verdicts.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Run a reward function over cached rollouts.

    With a version each verdict is asked for once, by all jobs; without one every session is scored
    again. Exit code 1 if a session has no new score, or a dump cannot be read.
    """
    from rlskip.rescore import scoring

    target = find_target(what, dump_dir(directory), decoder(tokenizer, skip_special=True))
    wanted = Steps.parse(steps, "--steps")
    if isinstance(target, Run):
        # Each as a run of that step alone, which is empty where a live run removes it meanwhile.
        chosen: list[Scope] = [target[n : n + 1] for n in target.steps() if n in wanted]
    else:
        chosen = [target] if target.number in wanted else []
    if not chosen:
        there = f"its steps are {compact(target.run.steps()) or 'none'}"
        raise NoSuchPlaceError(f"it has none of the steps {steps}", target.name, there)
    more = None if data is None else scoring.read_data(data)
    with _judge(reward, version) as judge:
        rescored = scoring.rescore(
            judge, chosen, workers=workers, data=more,
            progress=lambda some: progress(some, "scoring"),
        )  # fmt: skip
    asked = {"reward": judge.name, "version": judge.version, "asked": judge.asked}
    found = {"run": target.run.name, **asked, **rescored.as_json()}
    return put(as_json, found, _view(found), failed=found["failed"] or found["unreadable"])


@contextlib.contextmanager
def _judge(reward: str, version: str | None) -> Iterator[Judge]:
    """The function, which within the context can be asked."""
    from rlskip.rescore.judge import Judge, named_function

    found = named_function(reward, "--reward")
    judge: Judge | None = getattr(found, "_rlskip_judge", None)
    if judge is not None:
        if version:
            what = f"{reward} is a rlskip.cached_reward, which has a version of its own"
            raise ConfigError(what, "--reward", "leave --version out")
        yield judge
    elif version:
        yield Judge(found, None, version)
    else:
        # Equal sessions are asked for once even so.
        with tempfile.TemporaryDirectory(prefix="rlskip-") as unkept:
            yield Judge(found, unkept, None)


def _view(data: dict[str, Any]) -> list[Cell]:
    scores = [{"score": name, **data[name]} for name in ("old", "new") if data[name] is not None]
    asked = f"{data['run']}: {counted(data['sessions'], 'session')} scored by {data['reward']}, "
    asked += f"which was asked {counted(data['asked'], 'time')}"
    changed = f"{counted(data['changed'], 'score')} changed; of {counted(data['groups'], 'group')} "
    changed += f"{len(data['gained'])} gained a signal, {len(data['lost'])} lost it"
    kept = [] if data["version"] else ["its verdicts are not kept; --version NAME keeps them"]
    heads = {f">{name}": name for one in scores for name in one if name != "score"}
    figures = listing(scores, {"score": "score", **heads})
    view: list[Cell] = [asked, *kept, "", figures, "", changed]
    for word in ("gained", "lost"):
        if named := [short(one, 24) for one in data[word][:_NAMED]]:
            more = len(data[word]) - len(named)
            named += [f"and {more} more"] if more else []
            view.append(f"{word} a signal: {', '.join(named)}")
    if data["most_changed"]:
        most = [dict(one, old="none" if one["old"] is None else one["old"],
                     step="/".join(str(one[n]) for n in ("step", "call") if one[n] is not None))
                for one in data["most_changed"]]  # fmt: skip
        names = (">step", "group", ">session", ">old", ">new")
        view += ["", listing(most, {name: name.removeprefix(">") for name in names})]
    if data["failed"]:
        view.append(text(f"without a new score: {counted(data['failed'], 'session')}", "red"))
    for one in data["failures"]:
        where = f"step {one['step']}, group {short(one['group'], 24)}, session {one['session']}"
        view.append(f"{where}: {short(one['error'], 200)}")
    for one in data["unreadable"]:
        view.append(text(f"step {one['dump']} cannot be read: {one['problem']}", "red"))
    return view
