"""One step in one file: rollouts, stage records, config, versions and identity.

A bundle is a file in the dumps' format, with the trees ``manifest``, ``rollouts`` and ``stages``.
Nothing in it is code, and it has no path of the machine that made it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import xxhash

from rlskip._human import counted
from rlskip._version import __version__
from rlskip.batch.columns import columns_of
from rlskip.compare.records import StepRecords
from rlskip.compare.sides import Side
from rlskip.errors import RlskipError
from rlskip.exchange.rows import NAMES, named_row
from rlskip.format import container
from rlskip.format.codec import Packer
from rlskip.format.dump_errors import DAMAGE, DumpError
from rlskip.format.kinds import rebuild
from rlskip.runs.columns import rollout_columns
from rlskip.runs.on_disk import Dump, dumps_of
from rlskip.runs.opened import Step
from rlskip.runs.rollouts import Rollouts
from rlskip.skip.kept_config import read_config

_FORMAT = 2
_PATH = re.compile(r"(?:file:/+|(?<![\w.:/])[~/])[\w.@+~-]*(?:/[\w.@+~-]+(?: [\w.@+~-]+(?=/))*)+")
_TOKENS = (*NAMES.values(), "reward")  # columns without texts
_KEPT = ("seconds", "generation", "place", "lacks")  # of a dump's notes


@attrs.frozen(eq=False)
class Bundle:
    """A bundle, opened: what it says of itself, its rollouts, and its records if it has any."""

    manifest: Mapping[str, Any]
    rollouts: Rollouts
    records: StepRecords | None


def make_bundle(
    step: Step, out: Path, side: Side | None, *, group: str | None = None, redact: bool = False
) -> dict[str, Any]:
    """Write the bundle of a step, and return what it says of itself.

    It takes the records of the job that is `side`, all groups or the one named, and with `redact`
    in place of each text its length and a hash. Raises RlskipError where the step has no such
    group, DumpError where a dump cannot be read.
    """
    dumps = list(step.iter_dumps())
    rows = _rows_of(step, dumps, group, redact)
    parts = []
    for dump in [] if side is None else dumps_of(side.directory, step.number):
        part = dump.load(into="numpy")
        # The values of records may be texts.
        items = [{**item, "value": _portable(item["value"], redact)} for item in part["index"]]
        parts.append({**part, "index": items})
    meta = dumps[0].full_meta()
    manifest: dict[str, Any] = {
        "rlskip": __version__,
        "run": step.run.name,
        "step": step.number,
        "group": None if group is None else _portable_name(group, redact),
        "redacted": redact,
        "sessions": len(rows),
        "made": meta.created,
        "identity": None if meta.identity is None else _portable(meta.identity.as_json(), redact),
        "notes": {k: meta.info[k] for k in _KEPT if k in meta.info},
        "config": _portable(_config_of(step, meta.info.get("config")), redact),
        "job": None if side is None else side.directory.name,
    }
    packer = Packer()
    index = {
        "bundle": _FORMAT,
        "manifest": packer.node(json.loads(json.dumps(manifest, default=str))),
        "rollouts": packer.node(
            {n: c for n, c in columns_of(rows).items() if any(one is not None for one in c)}
        ),
        "stages": packer.node(parts),
    }
    with out.open("wb") as file:
        container.write(file, index, packer.arrays)
    return manifest


def open_bundle(file: Path) -> Bundle:
    """A bundle whose checksums are right; raises RlskipError where it is not, or not a bundle."""
    try:
        with file.open("rb") as opened:
            reader = container.Reader(opened, str(file))
            if "bundle" not in reader.index:
                remedy = "make one: rlskip bundle RUN STEP --out FILE"
                raise RlskipError("it is a dump, not a bundle", str(file), remedy)
            if (found := reader.index.get("bundle")) != _FORMAT:
                what = f"its format is {found!r:.20}, and this reads {_FORMAT}"
                raise RlskipError(what, str(file), "open it with the rlskip that made it")
            manifest, columns, stages = (
                rebuild(reader, tree, None, "numpy") for tree in ("manifest", "rollouts", "stages")
            )
        place = {"step": manifest["step"], "call": None}
        records = StepRecords(stages) if stages else None
        return Bundle(manifest, Rollouts(rollout_columns(columns), place), records)
    except OSError as error:
        raise RlskipError(f"it cannot be read: {error.strerror}", str(file)) from error
    except (DumpError, *DAMAGE) as error:
        what = f"it is not a bundle, or it is damaged: {getattr(error, 'what', repr(error))}"
        raise RlskipError(what, str(file), "make it again: rlskip bundle") from error


def _rows_of(
    step: Step, dumps: Sequence[Dump], group: str | None, redact: bool
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    names: set[str] = set()
    for number, dump in enumerate(dumps):
        rollouts = step.read(dump)
        for i, row in enumerate(rollouts):
            if group is not None and group not in (row["group"], row["uid"]):
                names.add(row["group"])
                continue
            uid = _portable_name(row["group"], redact)
            own = named_row(rollouts, i)
            own |= _portable({n: own[n] for n in own if n not in _TOKENS}, redact)
            uid = f"{number}:{uid}" if len(dumps) > 1 else uid
            rows.append({**own, "uid": uid, "session_id": row["session"], "turn": row["turn"]})
    if not rows:
        what = f"it has no group {group!r}" if names else "it has no rows"
        there = f"its groups are {', '.join(sorted(names)[:5])}" if names else "name another step"
        raise RlskipError(what, step.name, there)
    return rows


def _portable_name(name: str, redact: bool) -> str:
    """A group's name, which may be its prompt; those of two groups stay apart."""
    found: str = _portable(name, redact)
    return found if found == name else f"{found} ({_hash(name)})"


def _portable(value: Any, redact: bool) -> Any:
    """A value without paths of this machine, and if wanted without texts."""
    if isinstance(value, Mapping):
        return {_portable(str(k), False): _portable(v, redact) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(v, redact) for v in value]
    if not isinstance(value, str):
        return value
    if redact and value:
        return f"<text of {counted(len(value), 'character')}, {_hash(value)}>"
    return _PATH.sub(_named_file, value)


def _hash(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))


def _named_file(path: re.Match[str]) -> str:
    """Of a path the file's name; of one with few parts, as a home directory, nothing."""
    parts = [part for part in path[0].split("/") if part]
    return f"<path>/{parts[-1]}" if len(parts) > 2 else "<path>"


def _config_of(step: Step, name: Any) -> Any:
    """The config that the run keeps with the dump; None without one."""
    with contextlib.suppress(OSError, ValueError):
        return read_config(step.run.directory, name) if isinstance(name, str) else None
    return None
