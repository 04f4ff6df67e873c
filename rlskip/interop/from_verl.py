"""Import of verl's own dumps into a dump_dir, where rlskip's roles replay them.

A dump of verl does not record what it was made from: neither prompts nor sampling. It is stored
without an identity, and replayed without a comparison, with a warning. The name of its directory
decides which run it belongs to.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from rlskip.batch.columns import length_of
from rlskip.interop.bounds import Budget, Expansion, ForeignDumpError
from rlskip.interop.content import Content, Format, Into
from rlskip.interop.pickles import read_data_proto, read_queue_batch
from rlskip.keys import FINISHED, dump_tag, split_trajectory, status_tag
from rlskip.runs.on_disk import dumps_of
from rlskip.skip.groups import QueuedGroup, summary
from rlskip.store.layout import as_step, shape_of

_GEN_STEP = re.compile(r"genstep_0*(\d+)")
_PROTO, _QUEUE = "gen_batch.dp", "tq_batch.pt"
_OURS = b"rlskip\r\n"


def _is_dump(file: Path) -> bool:
    return file.name in (_PROTO, _QUEUE) and not _begins(file, _OURS)


def _begins(file: Path, *beginnings: bytes) -> bool:
    with open(file, "rb") as opened:
        return opened.read(8).startswith(beginnings)


def _read(file: Path, into: Into) -> Iterator[Content]:
    """A dump, of the place that its path tells: {run}/{shape}/{step}[/{part}]/file."""
    path = file.resolve()
    folder, part, is_queue = path.parent, None, _begins(file, b"PK")
    if is_queue:
        part = as_step(folder.name)
        folder = folder.parent if part is not None else folder
    step, shape = _step_of(folder, path, into), folder.parent
    run = into.run or (f"{shape.parent.name}/{shape.name}" if shape_of(shape.name) else None)
    directory = into.directory_of(run)
    if not is_queue:
        proto = read_data_proto(file)
        Expansion(Budget(file.stat().st_size)).charge(proto)
        yield Content(step, proto, length_of(proto), {}, run=run)
        return
    batch, part = read_queue_batch(file), part or 0
    first = sum(
        len(dump.meta.info.get("groups", ()))
        for dump in dumps_of(directory, step)
        if dump.meta is not None and (dump.place.part or 0) < part
    )
    n = (shape_of(directory.name) or {}).get("n", "")
    rollouts, info = _as_part(batch, step, int(n) if n.isdigit() else 0, first)
    yield Content(step, rollouts, len(batch["keys"]), info, part, run, "rollout_tq")


def _step_of(folder: Path, file: Path, into: Into) -> int:
    """The step that was given, else the directory's name, else what verl's meta.json says."""
    older = _GEN_STEP.fullmatch(folder.name)
    recorded, counted = (
        _recorded_step(file.with_name("meta.json")),
        int(older[1]) if older else None,
    )
    told = (into.step, as_step(folder.name), recorded, counted)
    step = next((one for one in told if one is not None), None)
    if step is None:
        raise ForeignDumpError("its path does not contain the step", remedy="give it with --step")
    return step


def _recorded_step(meta: Path) -> int | None:
    try:
        step = json.loads(meta.read_text(encoding="utf-8"))["global_steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if type(step) is int and step >= 0 else None


def _as_part(
    batch: Mapping[str, Any], of_step: int, n: int, first: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A sampled batch as role rollout_tq stores it, and the facts that it records with it.

    verl's file lacks the entries of the prompts themselves. They are added as finished, as verl
    adds them when it replays. Groups are in the order in which the batch names them.
    """
    rows = [(key, split_trajectory(key)) for key in batch["keys"]]
    if strange := next((key for key, row in rows if row is None), None):
        what = f"{strange!r} is not the key of a trajectory"
        raise ForeignDumpError(what, remedy="expected {uid}_{session}_{i}")
    steps = batch.get("global_steps")
    step = steps if type(steps) is int else of_step
    sessions: dict[str, set[int]] = {}
    tags: dict[str, dict[str, Any]] = {}
    for (key, row), tag in zip(rows, batch["tags"], strict=True):
        assert row is not None
        uid, session, _ = row
        sessions.setdefault(uid, set()).add(session)
        tags.setdefault(uid, {})[key[len(uid) :]] = tag
    expected = n or max((len(found) for found in sessions.values()), default=1)
    groups = []
    for position, uid in enumerate(tags, first):
        root = status_tag(step, FINISHED, expected) | dump_tag(of_step, position, None)
        groups.append(QueuedGroup(uid, {"": root, **tags[uid]}))
    part = {
        "groups": [attrs.asdict(group) for group in groups],
        "keys": batch["keys"],
        "fields": batch["tensordict"],
    }
    summaries = [summary(group, group.is_complete(batch["keys"], expected)) for group in groups]
    return part, {"part": secrets.token_hex(8), "groups": summaries, "seconds": 0.0}


DUMPS = Format("verl", _is_dump, _read, is_pickle=True)
