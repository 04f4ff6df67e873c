"""Dumps written as verl's own, which verl reads back."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlskip.batch.columns import is_tensor, objects_of
from rlskip.batch.tables import DataProtoParts
from rlskip.errors import RlskipError
from rlskip.runs.columns import is_queue_part, rollout_columns, values
from rlskip.runs.on_disk import Dump
from rlskip.runs.opened import Run

if TYPE_CHECKING:
    from tensordict import TensorDict


class ExportError(RlskipError, ValueError):
    """Rollouts that cannot be exported in the requested format."""


def write(dumps: Iterable[Dump], run: Run, out: Path) -> Iterator[tuple[Dump, Path | None]]:
    """Write dumps of `run` below `out`, where verl's own ``skip`` looks for them.

    verl has one ``gen_batch.dp`` for each step: of a step's calls, the first in `dumps` is written.

    Returns
    -------
    Iterator[tuple[Dump, Path or None]]
        Each dump with its file, once that is written; None for a call that is left out. An
        existing file is an error and stays unchanged.
    """
    steps: set[int] = set()  # whose gen_batch.dp is written
    for dump in dumps:
        if dump.step in steps:
            yield dump, None
            continue
        if dump.place.world_size > 1:
            raise ExportError("verl has no dumps of single ranks", f"{run.name}/{dump.name}")
        folder = out / run.name / str(dump.step)
        meta = {"global_steps": dump.step}
        rollouts = dump.load()
        if is_queue_part(rollouts):
            folder = out.joinpath(run.name, *dump.place.parts)
            file, content = "tq_batch.pt", _queue_batch(rollouts, dump)
            meta["num_trajectories"] = len(rollouts["keys"])
        else:
            file, content = "gen_batch.dp", _data_proto(rollouts, dump)
            steps.add(dump.step)
        _write(folder / file, content)
        # Last: verl takes a dump as complete once this file exists.
        _write(folder / "meta.json", json.dumps(meta).encode())
        yield dump, folder / file


def _data_proto(rollouts: Any, dump: Dump) -> bytes:
    """What ``DataProto.load_from_disk`` reads (verl.protocol, 0.6 to 0.9.1).

    Only verl's environment has the class. The state is therefore pickled as usual, and the
    instructions that name the class are written around it.
    """
    batch, others, meta_info = _parts(rollouts, dump)
    if batch is not None and len(batch.keys()):
        batch = batch.contiguous().consolidate()
    state = pickle.dumps((_saved(batch), others, meta_info), protocol=4)
    assert state[:2] == b"\x80\x04"
    assert state[-1:] == pickle.STOP
    new = pickle.GLOBAL + b"verl.protocol\nDataProto\n" + pickle.EMPTY_TUPLE + pickle.NEWOBJ
    return state[:2] + new + state[2:-1] + pickle.BUILD + pickle.STOP


def _parts(rollouts: Any, dump: Dump) -> tuple[TensorDict | None, dict[str, Any], dict[str, Any]]:
    if isinstance(rollouts, DataProtoParts):
        return rollouts.batch, rollouts.non_tensor_batch, rollouts.meta_info
    columns = rollout_columns(rollouts)
    if not columns.n or columns.columns.keys() == {"value"}:
        raise ExportError("a DataProto has named columns; these rollouts have none", dump.name)
    tensors = {k: v for k, v in columns.columns.items() if is_tensor(v)}
    others = {k: _objects(v) for k, v in columns.columns.items() if k not in tensors}
    from tensordict import TensorDict

    batch = TensorDict(tensors, batch_size=[columns.n]) if tensors else None
    return batch, others, dict(columns.whole)


def _objects(column: Any) -> np.ndarray:
    return column if isinstance(column, np.ndarray) else objects_of(values(column))


def _queue_batch(part: dict[str, Any], dump: Dump) -> bytes:
    """What ``RolloutTqSkip.load_dump_data`` of verl 0.9.1 reads."""
    tags = {
        group["uid"] + suffix: tag
        for group in part["groups"]
        for suffix, tag in group["tags"].items()
    }
    payload = {
        "tensordict": part["fields"],
        "tags": [dict(tags[key]) for key in part["keys"]],
        "keys": list(part["keys"]),
        "global_steps": dump.step,
    }
    return _saved(payload)


def _saved(value: Any) -> bytes:
    import torch  # here, because what is exported as JSON needs none

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(file, "xb") as opened:
            opened.write(content)
    except FileExistsError as error:
        raise ExportError(
            "the file exists already", str(file), "choose another --out, or remove it"
        ) from error
