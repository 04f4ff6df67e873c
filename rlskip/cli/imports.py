"""`rlskip import`: verl's own dumps into a store, so that our roles replay them.

A foreign dump does not say what it was made from: no prompts, no sampling. It is kept without
an identity, and such a dump is replayed uncompared, with a warning; the numbers that its
directory's name gives decide for which run.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rlskip.cli.dumps import NoSuchPlaceError, Run
from rlskip.cli.pickles import ForeignDumpError, read_data_proto, read_queue_batch
from rlskip.cli.screen import Answer, progress, size, table, text
from rlskip.errors import ConfigError
from rlskip.keys import FINISHED, dump_tag, split_trajectory, status_tag
from rlskip.skip.groups import Group, summary
from rlskip.store import StepStore
from rlskip.store.batches import DataProtoParts
from rlskip.store.layout import as_step, refuse_links, safe_name

_SHAPE = re.compile(r"GBS(\w+)_N(\w+)_in(\w+)_out(\w+)")
_GEN_STEP = re.compile(r"genstep_0*(\d+)")
_PROTO, _QUEUE = "gen_batch.dp", "tq_batch.pt"
_OURS = b"rlskip\r\n"


@attrs.frozen
class Foreign:
    """A dump of verl's: where it lies, and what its place says of it."""

    file: Path
    step: int
    inner: int | None
    run: str | None  # {experiment}_{project}/GBS.._N.._in.._out..
    is_queue: bool  # tq_batch.pt, else gen_batch.dp


@attrs.frozen
class Imported:
    """What became of one; `nbytes` in memory, None where there was a dump already."""

    file: str
    role: str
    step: int
    inner: int | None
    run: str
    rows: int
    nbytes: int | None


def import_dumps(
    source: Path, dump_dir: Path, *, run: str | None, step: int | None, trust_pickle: bool
) -> Answer:
    """Everything of verl's at or below `source` into `dump_dir`.

    Raises
    ------
    ForeignDumpError
        `trust_pickle` is false, or a file is not what it should be; those before it are kept.
    """
    found = find(source, run, step)
    if not trust_pickle:
        raise ForeignDumpError(
            f"{len(found)} dumps of verl, which are pickles: a pickle can name any code",
            str(source),
            "if you trust where they come from, add --trust-pickle; even then only the types "
            "that rollouts need are admitted",
        )
    places: dict[tuple[str, int], int] = {}  # groups so far, over a step's parts
    done = [_import(foreign, dump_dir, places) for foreign in progress(found, "importing")]
    shown = table(">step", "role", ">rows", ">in memory", "into run")
    for one in done:
        name = str(one.step) if one.inner is None else f"{one.step}/{one.inner}"
        kept = "kept as it was" if one.nbytes is None else size(one.nbytes)
        shown.add_row(name, one.role, str(one.rows), kept, text(one.run))
    return Answer([attrs.asdict(one) for one in done], [shown])


def find(source: Path, run: str | None, step: int | None) -> list[Foreign]:
    """verl's dumps at or below `source`, by run and step; raises where there are none."""
    if not source.exists():
        raise NoSuchPlaceError("no such file or directory", str(source))
    if source.is_file():
        files = [source]
    else:
        files = sorted(p for name in (_PROTO, _QUEUE) for p in source.rglob(name))
        files = [file for file in files if not _begins(file, _OURS)]
    if not files:
        raise NoSuchPlaceError(
            "no dump of verl here", str(source), f"it holds no {_PROTO} and no {_QUEUE} of verl's"
        )
    if step is not None and len(files) > 1:
        raise ConfigError(
            f"{len(files)} dumps cannot all be that step", "--step", "name one of the files"
        )
    dumps = [_place(file.resolve(), run, step) for file in files]
    return sorted(dumps, key=lambda d: (d.run or "", d.step, d.inner or 0))


def _begins(file: Path, *beginnings: bytes) -> bool:
    with open(file, "rb") as opened:
        return opened.read(8).startswith(beginnings)


def _place(file: Path, run: str | None, step: int | None) -> Foreign:
    """What the directories' names say: {run}/{shape}/{step}[/{inner}]/file."""
    folder, inner, is_queue = file.parent, None, _begins(file, b"PK")
    if is_queue:
        inner = as_step(folder.name)
        folder = folder.parent if inner is not None else folder
    named, older = as_step(folder.name), _GEN_STEP.fullmatch(folder.name)
    if step is None:
        step = _said_step(file.with_name("meta.json")) if older or named is None else named
    if step is None and older:
        step = int(older[1])
    if step is None:
        raise ForeignDumpError("nothing says of which step it is", str(file), "say it with --step")
    shape = folder.parent
    if run is None and _SHAPE.fullmatch(shape.name):
        run = f"{shape.parent.name}/{shape.name}"
    if is_queue and inner is None:
        inner = 0
    return Foreign(file, step, inner, run, is_queue)


def _said_step(meta: Path) -> int | None:
    try:
        said = json.loads(meta.read_text(encoding="utf-8"))["global_steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return said if type(said) is int and said >= 0 else None


def _import(foreign: Foreign, dump_dir: Path, places: dict[tuple[str, int], int]) -> Imported:
    if foreign.run is None or any(p != safe_name(p) for p in foreign.run.split("/")):
        raise ConfigError(
            "the place of this dump does not say for which run it is"
            if foreign.run is None
            else f"{foreign.run!r} is no name that a run of ours has",
            str(foreign.file),
            "name it: --run EXPERIMENT_PROJECT/GBS.._N.._in.._out.. "
            "(`rlskip doctor -- <your command>` shows it)",
        )
    directory = dump_dir / foreign.run
    refuse_links(directory)
    first = places.setdefault((foreign.run, foreign.step), 0)
    info: dict[str, Any] = {"job": "import", "imported": str(foreign.file)}
    rollouts: Any
    if foreign.is_queue:
        batch = read_queue_batch(foreign.file)
        rollouts, described = _as_part(batch, foreign, first)
        info |= described
        places[foreign.run, foreign.step] += len(described["groups"])
        rows, role = len(batch["keys"]), "rollout_tq"
    else:
        rollouts = DataProtoParts(*read_data_proto(foreign.file))
        rows, role = _rows(rollouts), "rollout"
    nbytes = None
    if not Run(directory).dumps(foreign.step, foreign.inner):
        store = StepStore(directory)
        nbytes = store.save(foreign.step, rollouts, info=info, inner=foreign.inner).nbytes
    return Imported(str(foreign.file), role, foreign.step, foreign.inner, foreign.run, rows, nbytes)


def _rows(parts: DataProtoParts) -> int:
    if parts.batch is not None:
        return len(parts.batch)
    return max((len(column) for column in parts.non_tensor_batch.values()), default=0)


def _as_part(
    batch: Mapping[str, Any], foreign: Foreign, first: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A queue's batch as role rollout_tq keeps it, and what it notes of it.

    The prompts' own entries are not in verl's file; they are made anew, finished, as verl makes
    them when it replays. Groups stand in the order in which the batch names them.
    """
    rows = [(key, split_trajectory(key)) for key in batch["keys"]]
    if strange := next((key for key, row in rows if row is None), None):
        raise ForeignDumpError(
            f"{strange!r} is no trajectory's key", str(foreign.file), "expected {uid}_{session}_{i}"
        )
    steps = batch.get("global_steps")
    step = steps if type(steps) is int else foreign.step
    sessions: dict[str, set[int]] = {}
    tags: dict[str, dict[str, Any]] = {}
    for (key, row), tag in zip(rows, batch["tags"], strict=True):
        assert row is not None
        uid, session, _ = row
        sessions.setdefault(uid, set()).add(session)
        tags.setdefault(uid, {})[key[len(uid) :]] = tag
    expected = _sessions_per_prompt(foreign, sessions.values())
    groups = []
    for position, uid in enumerate(tags, first):
        root = status_tag(step, FINISHED, expected) | dump_tag(foreign.step, position, None)
        groups.append(Group(uid, {"": root, **tags[uid]}))
    part = {
        "groups": [attrs.asdict(group) for group in groups],
        "keys": batch["keys"],
        "fields": batch["tensordict"],
    }
    whole = [summary(group, group.is_whole(batch["keys"], expected)) for group in groups]
    return part, {"part": secrets.token_hex(8), "groups": whole, "seconds": 0.0}


def _sessions_per_prompt(foreign: Foreign, sessions: Sequence[set[int]] | Any) -> int:
    """As the directory says (N..); where it does not, as many as the fullest group has."""
    shape = _SHAPE.search(foreign.run or "")
    if shape is not None and shape[2].isdigit() and int(shape[2]) > 0:
        return int(shape[2])
    return max((len(found) for found in sessions), default=1)
