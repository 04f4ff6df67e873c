"""`rlskip export`: dumps as verl reads them back, or as readable rows."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from rlskip.cli.dumps import Dump, Target
from rlskip.cli.rows import (
    NAMES,
    Columns,
    Decoder,
    columns_of,
    is_queue_part,
    plain,
    rows_of,
    values,
)
from rlskip.cli.screen import Answer, finite, progress, table, text
from rlskip.errors import RlskipError
from rlskip.store.batches import DataProtoParts

_SURROGATE = re.compile("[\ud800-\udfff]")


class ExportError(RlskipError, ValueError):
    """Rollouts that cannot be written in the form asked for."""


# -- verl ----------------------------------------------------------------------------------


def to_verl(target: Target, out: Path) -> Answer:
    """Write ``{out}/{run}/{step}/...`` as verl would have: its ``skip`` finds them in `out`.

    Files that are there already are not touched: an error.
    """
    written = []
    for dump in progress(target.dumps(), "exporting"):
        if dump.place.world_size > 1:
            raise ExportError("verl knows no shards of ranks", f"{target.run.name}/{dump.name}")
        folder = out.joinpath(*target.run.directory.parts[-2:], *dump.place.parts)
        rollouts = dump.load()
        if is_queue_part(rollouts):
            file, content = "tq_batch.pt", _queue_batch(rollouts, dump)
            meta: dict[str, Any] = {
                "global_steps": dump.step,
                "num_trajectories": len(rollouts["keys"]),
            }
        else:
            file, content = "gen_batch.dp", _data_proto(rollouts, dump)
            meta = {"global_steps": dump.step}
        _write(folder / file, content)
        # verl takes a dump for whole once this is there: so it comes last.
        _write(folder / "meta.json", json.dumps(meta).encode())
        written.append(str(folder / file))
    shown = table("written for verl")
    for path in written:
        shown.add_row(text(path))
    return Answer(written, [shown])


def _data_proto(rollouts: Any, dump: Dump) -> bytes:
    """What ``DataProto.load_from_disk`` reads (verl.protocol, 0.6 to 0.9.1).

    A pickle that only verl can name the class of: so the state is pickled as ever, and the two
    instructions before it and the one after it are written here.
    """
    batch, others, meta_info = _parts(rollouts, dump)
    if batch is not None and len(batch.keys()):
        batch = batch.contiguous().consolidate()
    buffer = io.BytesIO()
    torch.save(batch, buffer)
    state = pickle.dumps((buffer.getvalue(), others, meta_info), protocol=4)
    assert state[:2] == b"\x80\x04"
    assert state[-1:] == pickle.STOP
    new = pickle.GLOBAL + b"verl.protocol\nDataProto\n" + pickle.EMPTY_TUPLE + pickle.NEWOBJ
    return state[:2] + new + state[2:-1] + pickle.BUILD + pickle.STOP


def _parts(rollouts: Any, dump: Dump) -> tuple[TensorDict | None, dict[str, Any], dict[str, Any]]:
    if isinstance(rollouts, DataProtoParts):
        return rollouts.batch, rollouts.non_tensor_batch, rollouts.meta_info
    columns = columns_of(rollouts)
    if not columns.n or columns.columns.keys() == {"value"}:
        raise ExportError("a DataProto has named columns, and these have none", dump.name)
    tensors = {k: v for k, v in columns.columns.items() if isinstance(v, torch.Tensor)}
    others = {k: _objects(v) for k, v in columns.columns.items() if k not in tensors}
    batch = TensorDict(tensors, batch_size=[columns.n]) if tensors else None
    return batch, others, {}


def _objects(column: Any) -> np.ndarray:
    if isinstance(column, np.ndarray):
        return column
    cells = values(column)
    made = np.empty(len(cells), object)
    for i, cell in enumerate(cells):
        made[i] = cell
    return made


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
    buffer = io.BytesIO()
    torch.save(payload, buffer)
    return buffer.getvalue()


# -- rows ------------------------------------------------------------------------------------


def to_jsonl(target: Target, out: Path | None, decoder: Decoder | None) -> Answer | None:
    """One JSON object a row, to `out`; to stdout (and no answer) without one.

    JSON has no number that is not finite: null stands for it.
    """
    if out is None:
        for dump in target.dumps():
            for line in _lines(dump, decoder):
                print(line)
        return None
    count = 0
    temporary = out.with_name(f"{out.name}.{secrets.token_hex(4)}")
    if out.exists():
        raise ExportError("there is a file already", str(out), "name another, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            for dump in progress(target.dumps(), "exporting"):
                for line in _lines(dump, decoder):
                    file.write(line + "\n")
                    count += 1
        os.rename(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    return Answer({"file": str(out), "rows": count}, [text(f"{count} rows in {out}")])


def _lines(dump: Dump, decoder: Decoder | None) -> Iterator[str]:
    columns = columns_of(dump.load())
    rows = rows_of(columns)
    shown = _others(columns) if rows else columns.columns
    others = {name: values(column) for name, column in shown.items()}
    for i in range(columns.n):
        line: dict[str, Any] = {"step": dump.step, "row": i}
        if dump.place.inner is not None:
            line["inner"] = dump.place.inner
        if rows:
            row = rows[i]
            line |= {"uid": row.uid, "prompt": row.prompt, "response": row.response}
            line |= {"response_mask": row.mask, "log_probs": row.log_probs, "reward": row.reward}
            if decoder is not None:
                line |= {"prompt_text": decoder(row.prompt), "response_text": decoder(row.response)}
        line |= {name: plain(cells[i]) for name, cells in others.items() if name not in line}
        said = json.dumps(finite(line), ensure_ascii=False, allow_nan=False)
        # Half a character, which a tokenizer may leave, is no UTF-8, but may be escaped.
        yield _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", said)


def _others(columns: Columns) -> dict[str, Any]:
    """The columns that a row does not hold already in one form or another."""
    used = {named[0] for what in NAMES if (named := columns.of(what)) is not None}
    padded = {"position_ids"}
    return {k: v for k, v in columns.columns.items() if k not in used | padded}


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(file, "xb") as opened:
            opened.write(content)
    except FileExistsError as error:
        raise ExportError(
            "there is a file already", str(file), "name another --out, or remove it"
        ) from error
