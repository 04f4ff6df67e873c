"""`rlskip show STEP`: what is recorded of a dump, its fields, and some of its sessions."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import attrs
from rich.console import RenderableType

from rlskip._human import age, duration, number, short, size
from rlskip.cli.screen import Answer, facts, table, text
from rlskip.runs.counts import Counts
from rlskip.runs.decoding import Decoder
from rlskip.runs.fields import Field, describe
from rlskip.runs.on_disk import Dump, Selection
from rlskip.runs.trajectories import (
    Columns,
    plain,
    real_columns,
    rollout_columns,
    trajectories_at,
    values,
)
from rlskip.store import DumpMeta

_SHOWN = 400  # characters of a cell


def show(target: Selection, sessions: int, decoder: Decoder | None) -> Answer:
    """All dumps of `target` (a step has several if it has parts or shards)."""
    data, view = [], []
    for dump in target.dumps():
        columns = rollout_columns(dump.load(into="numpy"))
        counts = Counts.of(columns)
        fields = [describe(name, column) for name, column in real_columns(columns).items()]
        one = {
            "dump": dump.name,
            "directory": str(dump.place.directory),
            "meta": attrs.asdict(dump.meta) if dump.meta else None,
            "rows": columns.n,
            "sessions": len(counts.sessions),
            "groups": counts.groups,
            "mean_reward": counts.mean_reward,
            "mean_length": counts.mean_length,
            "fields": [attrs.asdict(field) for field in fields],
            "whole": {name: plain(value) for name, value in columns.whole.items()},
            "sample": _sample(columns, counts, sessions, decoder),
        }
        data.append(one)
        view += _view(target, dump, one, fields)
    return Answer(data, view)


def _sample(
    columns: Columns, counts: Counts, number: int, decoder: Decoder | None
) -> list[dict[str, Any]]:
    """The last row of each of the first sessions: it has all turns before it in its prompt."""
    sessions = counts.sessions[:number]
    rows = trajectories_at(columns, [one.rows[-1] for one in sessions])
    if not rows:
        cells = {name: values(column) for name, column in columns.columns.items()}
        last = (one.rows[-1] for one in sessions)
        return [{name: plain(column[i]) for name, column in cells.items()} for i in last]
    sample = []
    for i, (row, one) in enumerate(zip(rows, sessions, strict=True)):
        line = attrs.asdict(row)
        line |= {"session_reward": counts.rewards[i], "session_length": counts.lengths[i]}
        line |= {"group": one.group, "session": one.number, "turns": len(one.rows)}
        if decoder is not None:
            line["prompt_text"] = decoder(row.prompt)
            line["response_text"] = decoder(row.response)
        sample.append(line)
    return sample


# -- for people ------------------------------------------------------------------------------


def _view(
    target: Selection, dump: Dump, data: dict[str, Any], fields: list[Field]
) -> list[RenderableType]:
    shown = table("field", "kind", ">shape", "dtype", ">min", ">mean", ">max", "")
    for field in fields:
        shown.add_row(
            text(field.name),
            field.kind,
            field.shape,
            text(field.dtype),
            number(field.min),
            number(field.mean),
            number(field.max),
            text(field.note, "dim"),
        )
    view: list[RenderableType] = [_head(target, dump, data), text(""), shown]
    whole = [(name, short(str(value), _SHOWN)) for name, value in data["whole"].items()]
    if whole:
        view += [facts(whole), text("")]
    return view + [part for line in data["sample"] for part in _row_view(line)]


def _head(target: Selection, dump: Dump, data: dict[str, Any]) -> RenderableType:
    pairs: list[tuple[str, Any]] = [
        ("dump", f"{target.run.name}/{dump.name}"),
        ("rows", data["rows"]),
        ("sessions", f"{data['sessions']} in {data['groups']} groups"),
        ("mean reward", number(data["mean_reward"]) or None),
        ("mean length", number(data["mean_length"]) or None),
        ("on disk", size(dump.size)),
    ]
    meta = dump.meta
    if meta is not None:
        pairs += [
            ("in memory", size(meta.nbytes)),
            ("written", f"{meta.created} ({age(dump.written)} ago)"),
            ("by job", meta.info.get("job")),
            ("imported", meta.info.get("imported")),
            ("generated in", None if dump.seconds is None else duration(dump.seconds)),
            ("made from", _identity(meta)),
        ]
    return facts(pairs)


def _identity(meta: DumpMeta) -> str:
    found = meta.identity
    if found is None:
        return "not recorded: it is replayed without a comparison"
    made = {"prompts": found.prompts_hash, "n": found.n, "prompt_len": found.prompt_len}
    made |= {"response_len": found.response_len, **found.sampling, **found.extra}
    made |= {"model": found.model}
    return ", ".join(f"{name} {value}" for name, value in made.items() if value is not None)


def _row_view(line: dict[str, Any]) -> list[RenderableType]:
    if "session_length" not in line:
        return [facts((name, short(str(value), _SHOWN)) for name, value in line.items())]
    head = f"row {line['index']}, group {line['group']}, session {line['session']}"
    if line["turns"] > 1:
        head += f", the last of {line['turns']} turns"
    if line["session_reward"] is not None:
        head += f", reward {number(line['session_reward'])}"
    response, mask = line["response"], line["mask"]
    pairs: list[tuple[str, Any]] = [
        ("  prompt", short(line.get("prompt_text") or _tokens(line["prompt"]), _SHOWN)),
        ("  response", short(line.get("response_text") or _tokens(response), _SHOWN)),
    ]
    if mask is not None and not all(mask):
        pairs.append(("  sampled", f"{sum(mask)} of {len(response)} tokens"))
    if line["log_probs"]:
        pairs.append(("  log-prob", f"{fmean(line['log_probs']):.3f} on average"))
    return [text(head, "bold"), facts(pairs)]


def _tokens(tokens: list[int]) -> str:
    count = "1 token" if len(tokens) == 1 else f"{len(tokens)} tokens"
    return f"{' '.join(map(str, tokens))}  ({count})"
