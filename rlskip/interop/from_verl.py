"""Import of verl's own dumps into a dump_dir, where rlskip's roles replay them.

A dump of verl does not record what it was made from: neither prompts nor sampling. It is stored
without an identity, and replayed without a comparison, with a warning. The name of its directory
decides which run it belongs to.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from rlskip.batch.columns import length_of
from rlskip.errors import ConfigError
from rlskip.interop.bounds import ForeignDumpError
from rlskip.interop.pickles import named_errors, read_data_proto, read_queue_batch
from rlskip.keys import FINISHED, dump_tag, split_trajectory, status_tag
from rlskip.runs.on_disk import dumps_of
from rlskip.runs.opened import NoSuchPlaceError
from rlskip.skip.groups import QueuedGroup, summary
from rlskip.store import StepStore
from rlskip.store.layout import as_step, refuse_links, safe_name, shape_of

_GEN_STEP = re.compile(r"genstep_0*(\d+)")
_PROTO, _QUEUE = "gen_batch.dp", "tq_batch.pt"
_OURS = b"rlskip\r\n"


@attrs.frozen
class Foreign:
    """A dump of verl, and what its path says about it."""

    file: Path
    step: int
    part: int | None
    run: str | None  # {experiment}_{project}/GBS.._N.._in.._out..
    is_queue: bool  # tq_batch.pt, else gen_batch.dp


@attrs.frozen
class Imported:
    """An imported dump: `nbytes` in memory, None if a dump existed already."""

    file: str
    role: str
    step: int
    part: int | None
    run: str
    rows: int
    nbytes: int | None


def import_dumps(found: Iterable[Foreign], dump_dir: Path) -> Iterator[Imported]:
    """Store each of verl's dumps in `dump_dir`. A dump that exists there stays.

    Raises
    ------
    ForeignDumpError
        A file is not what it should be. The dumps before it are stored.
    """
    places: dict[tuple[str, int], int] = {}  # groups so far, over the parts of a step
    for foreign in found:
        with named_errors(foreign.file):
            done = _import(foreign, dump_dir, places)
        yield done


def find(source: Path, run: str | None, step: int | None) -> list[Foreign]:
    """The dumps of verl at or below `source`, by run and step.

    Raises
    ------
    NoSuchPlaceError
        There are none.
    """
    if not source.exists():
        raise NoSuchPlaceError("no such file or directory", str(source))
    if source.is_file():
        files = [source]
    else:
        files = sorted(p for name in (_PROTO, _QUEUE) for p in source.rglob(name))
        files = [file for file in files if file.is_file() and not _begins(file, _OURS)]
    if not files:
        remedy = f"expected {_PROTO} or {_QUEUE} files of verl"
        raise NoSuchPlaceError("no dumps of verl here", str(source), remedy)
    if step is not None and len(files) > 1:
        what = f"{len(files)} dumps cannot all be of one step"
        raise ConfigError(what, "--step", "name one of the files")
    dumps = [_place(file.resolve(), run, step) for file in files]
    return sorted(dumps, key=lambda d: (d.run or "", d.step, d.part or 0))


def _begins(file: Path, *beginnings: bytes) -> bool:
    with open(file, "rb") as opened:
        return opened.read(8).startswith(beginnings)


def _place(file: Path, run: str | None, step: int | None) -> Foreign:
    """What the path says: {run}/{shape}/{step}[/{part}]/file."""
    folder, part, is_queue = file.parent, None, _begins(file, b"PK")
    if is_queue:
        part = as_step(folder.name)
        folder = folder.parent if part is not None else folder
    named, older = as_step(folder.name), _GEN_STEP.fullmatch(folder.name)
    if step is None:
        step = _recorded_step(file.with_name("meta.json")) if older or named is None else named
    if step is None and older:
        step = int(older[1])
    if step is None:
        what = "its path does not contain the step"
        raise ForeignDumpError(what, str(file), "give it with --step")
    shape = folder.parent
    if run is None and shape_of(shape.name):
        run = f"{shape.parent.name}/{shape.name}"
    if is_queue and part is None:
        part = 0
    return Foreign(file, step, part, run, is_queue)


def _recorded_step(meta: Path) -> int | None:
    try:
        step = json.loads(meta.read_text(encoding="utf-8"))["global_steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if type(step) is int and step >= 0 else None


def _import(foreign: Foreign, dump_dir: Path, places: dict[tuple[str, int], int]) -> Imported:
    if foreign.run is None or any(p != safe_name(p) for p in foreign.run.split("/")):
        what = f"{foreign.run!r} is not the name of a run"
        raise ConfigError(
            "its path does not contain the run" if foreign.run is None else what,
            str(foreign.file),
            "give it with --run EXPERIMENT_PROJECT/GBS.._N.._in.._out.. "
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
        rollouts = read_data_proto(foreign.file)
        rows, role = length_of(rollouts), "rollout"
    nbytes = None
    if not dumps_of(directory, foreign.step, foreign.part):
        store = StepStore(directory)
        nbytes = store.save(foreign.step, rollouts, info=info, part=foreign.part).nbytes
    return Imported(str(foreign.file), role, foreign.step, foreign.part, foreign.run, rows, nbytes)


def _as_part(
    batch: Mapping[str, Any], foreign: Foreign, first: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A sampled batch as role rollout_tq stores it, and the facts that it records with it.

    verl's file lacks the entries of the prompts themselves. They are added as finished, as verl
    adds them when it replays. Groups are in the order in which the batch names them.
    """
    rows = [(key, split_trajectory(key)) for key in batch["keys"]]
    if strange := next((key for key, row in rows if row is None), None):
        what = f"{strange!r} is not the key of a trajectory"
        raise ForeignDumpError(what, str(foreign.file), "expected {uid}_{session}_{i}")
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
        groups.append(QueuedGroup(uid, {"": root, **tags[uid]}))
    part = {
        "groups": [attrs.asdict(group) for group in groups],
        "keys": batch["keys"],
        "fields": batch["tensordict"],
    }
    summaries = [summary(group, group.is_complete(batch["keys"], expected)) for group in groups]
    return part, {"part": secrets.token_hex(8), "groups": summaries, "seconds": 0.0}


def _sessions_per_prompt(foreign: Foreign, sessions: Iterable[set[int]]) -> int:
    """N in the directory's name, else the number of sessions of the largest group."""
    shapes = map(shape_of, (foreign.run or "").split("/"))
    n = next((shape["n"] for shape in shapes if shape), "")
    if n.isdigit() and int(n) > 0:
        return int(n)
    return max((len(found) for found in sessions), default=1)
