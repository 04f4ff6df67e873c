"""`rlskip show STEP`: what is recorded of a dump, its figures, and some of its sessions."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from rlskip._human import age, counted, duration, number, short, size
from rlskip.cli.options import STEP, Dir, Json, Success, Tokenizer, decoder, dump_dir
from rlskip.cli.screen import Cell, facts, put, text
from rlskip.runs.find import Target, find_target
from rlskip.runs.on_disk import Dump

if TYPE_CHECKING:
    from rlskip.runs.rollouts import SessionRows
    from rlskip.store import DumpMeta

_SHOWN = 400  # characters of a cell


def show(
    step: Annotated[str, typer.Argument(help=STEP)],
    directory: Dir = None,
    sessions: Annotated[int, typer.Option(min=0, help="How many to show.")] = 3,
    success: Success = 0.5,
    tokenizer: Tokenizer = None,
    as_json: Json = False,
) -> int:
    """Show a dump: figures, some sessions."""
    from rlskip.runs.figures import Sessions, by_interest, step_figures

    target = find_target(step, dump_dir(directory), decoder(tokenizer))
    data: list[Any] = []
    view: list[Cell] = []
    for dump in target.iter_dumps():
        rollouts, meta = target.read(dump), dump.full_meta()
        every, known = rollouts.sessions, Sessions.of(rollouts)
        shown = by_interest(known.group, known.reward)[:sessions].tolist()
        found = {
            "dump": dump.name,
            "directory": str(dump.place.directory),
            # What an identity ignored is what a call does not compare.
            "meta": attrs.asdict(meta, filter=lambda field, _: field.name != "ignored"),
            "rows": len(rollouts),
            "figures": step_figures([(dump, known)], success),
            "fields": list(rollouts.columns.columns),
            "sample": [_sampled(every[i]) for i in sorted(shown)],
        }
        data.append(found)
        view += _view(target, dump, meta, found)
    return put(as_json, data, view)


def _sampled(session: SessionRows) -> dict[str, Any]:
    """The last row of a session, which has all turns before it in its prompt."""
    figures = {"turns": len(session.rows), "session_reward": session.reward}
    return {**session.turns[-1], **figures, "session_length": session.length}


def _view(target: Target, dump: Dump, meta: DumpMeta, data: dict[str, Any]) -> list[Cell]:
    made = meta.identity
    known = {**made.compared, "model": made.noted.get("model")} if made is not None else {}
    identity = ", ".join(f"{name} {v}" for name, v in known.items() if v is not None)
    pairs: list[tuple[str, Any]] = [
        ("dump", f"{target.run.name}/{dump.name}"),
        ("rows", data["rows"]),
        ("fields", ", ".join(data["fields"]) or None),
        *_figures(data["figures"]),
        ("on disk", size(dump.size)),
        ("in memory", size(meta.nbytes) if meta.nbytes else None),
        ("written", f"{meta.created} ({age(dump.written)} ago)"),
        ("by job", meta.info.get("job")),
        ("generated in", None if dump.seconds is None else duration(dump.seconds)),
        ("made from", identity or "not recorded: it is replayed without a comparison"),
    ]
    sample = [part for line in data["sample"] for part in _row_view(line)]
    return [facts(pairs), "", *sample]


def _figures(of: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "sessions", f"{of['sessions']} in {counted(of['groups'], 'group')}"
    for name in ("reward", "length"):
        if of[name] is not None:
            quartiles = ", ".join(number(of[key]) for key in of if key.startswith(f"{name}_"))
            yield f"mean {name}", f"{number(of[name])} (quartiles {quartiles})"
    if of["pass_1"] is not None:
        yield "pass@1", number(of["pass_1"])
    if of["no_signal"] is not None:
        yield f"pass@{of['k']}", number(of["pass_k"])
        yield "no signal", f"{100 * of['no_signal']:.3g} % of the groups"


def _row_view(line: dict[str, Any]) -> list[Cell]:
    response, mask = line["response"], line["mask"]
    if response is None:
        return [facts((name, short(str(v), _SHOWN)) for name, v in line.items() if v is not None)]
    head = f"row {line['row']}, group {line['group']}, session {line['session']}"
    head += f", the last of {line['turns']} turns" if line["turns"] > 1 else ""
    if (reward := line["session_reward"]) is not None:
        head += f", reward {number(reward)}"
    is_partial, probs = mask is not None and not all(mask), line["log_probs"]
    pairs: list[tuple[str, Any]] = [
        ("  prompt", short(line.get("prompt_text") or _tokens(line["prompt"] or []), _SHOWN)),
        ("  response", short(line.get("response_text") or _tokens(response), _SHOWN)),
        ("  sampled", f"{sum(mask)} of {counted(len(response), 'token')}" if is_partial else None),
        ("  log-prob", f"{fmean(probs):.3f} on average" if probs else None),
    ]
    return [text(head, "bold"), facts(pairs)]


def _tokens(tokens: list[int]) -> str:
    return f"{' '.join(map(str, tokens))}  ({counted(len(tokens), 'token')})"
