"""Rollouts for other programs: JSON lines, Parquet, chats, ATIF, verl's text, verifiers' traces."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlskip._human import finite
from rlskip._version import __version__
from rlskip.interop.to_verl import ExportError
from rlskip.runs.conversation import Said
from rlskip.runs.rollouts import SessionRows
from rlskip.runs.scope import Scope
from rlskip.runs.tables import By, extra
from rlskip.store.layout import safe_name

if TYPE_CHECKING:
    import pyarrow as pa

_SURROGATE = re.compile("[\ud800-\udfff]")
_ROLES = {"assistant": "agent", "user": "user", "system": "system", "tool": "user"}


def line(value: Any) -> str:
    """`value` on one line. JSON has no NaN and no infinity: null is written."""
    encoded = json.dumps(finite(value), ensure_ascii=False, allow_nan=False)
    # A lone surrogate, which a tokenizer may leave, has no UTF-8 form but can be escaped.
    return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", encoded)


def write_parquet(target: Scope, out: Path, by: By) -> int:
    """Write a table, a row group for each dump, and return the number of its rows.

    Its columns are those of the first dump. Where a later one has others, or others of another
    type, all are read once more for the columns of all; what a dump lacks is null in its rows.

    Raises
    ------
    ExportError
        A column has types that no one type holds.
    """
    schema: pa.Schema | None = None
    while True:
        rows, written, schema = _write_tables(target, out, by, schema)
        if written == schema:
            return rows


def _write_tables(
    target: Scope, out: Path, by: By, schema: pa.Schema | None
) -> tuple[int, pa.Schema | None, pa.Schema | None]:
    """How many rows were written, with which schema (by default the first table's), and all's.

    From the first table on that the schema does not hold, nothing is written.
    """
    pa, pq, writer, rows = extra("pyarrow"), extra("pyarrow.parquet"), None, 0
    every = schema
    try:
        for table in _tables(target, by):
            schema, every = schema or table.schema, every or table.schema
            try:
                both = [every, table.schema]
                every = pa.unify_schemas(both, promote_options="permissive")
                if every != schema:
                    continue
                for name in set(schema.names) - set(table.column_names):
                    nulls = pa.nulls(table.num_rows, schema.field(name).type)
                    table = table.append_column(name, nulls)
                table = table.select(schema.names).cast(schema)
            except pa.ArrowException as error:
                what = f"its columns do not fit those before: {str(error).partition(chr(10))[0]}"
                step = table["step"][0].as_py() if table.num_rows else "?"
                remedy = "export the steps in several files"
                raise ExportError(what, f"step {step}", remedy) from error
            writer = writer or pq.ParquetWriter(out, schema)
            writer.write_table(table)
            rows += table.num_rows
    finally:
        if writer is not None:
            writer.close()
    return rows, schema, every


def _tables(target: Scope, by: By) -> Iterator[pa.Table]:
    """A table for each dump, with null for mappings that are all empty, which Parquet lacks."""
    pa = extra("pyarrow")

    def kept(dtype: Any) -> Any:
        if pa.types.is_list(dtype):
            return pa.list_(kept(dtype.value_type))
        if not pa.types.is_struct(dtype):
            return dtype
        fields = [field.with_type(kept(field.type)) for field in dtype]
        return pa.struct(fields) if fields else pa.null()

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: filled(item) for name, item in value.items()} or None
        return [filled(item) for item in value] if isinstance(value, list) else value

    for table in target.iter_tables(by=by):
        for i, field in enumerate(table.schema):
            if (dtype := kept(field.type)) != field.type:
                cells = [filled(cell) for cell in table[i].to_pylist()]
                table = table.set_column(i, field.name, pa.array(cells, dtype))
        yield table


def chats(target: Scope) -> Iterator[str]:
    """A line for each session: its chat messages, its reward, and where it is."""
    for session in target.sessions():
        about = {"group": session.group, "session": session.number, "reward": session.reward}
        yield line({"messages": _messages(session), **session.place, **about})


def write_atif(target: Scope, out: Path) -> Iterator[Path]:
    """Write a trajectory in ATIF for each session below the directory `out`."""
    for session in target.sessions():
        name = _name(session)
        file = out / f"{name}.json"
        if file.exists():
            raise ExportError("the file exists already", str(file), "choose another --out")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(line(_trajectory(session, name)) + "\n", encoding="utf-8")
        yield file


def _trajectory(session: SessionRows, name: str) -> dict[str, Any]:
    _messages(session)  # raises where there are none
    steps: list[dict[str, Any]] = []
    for turn, (told, answers) in zip(session.turns, session.said, strict=True):
        context = turn.get("prompt")
        if context is not None:
            context = context[: len(context) - sum(len(one.tokens) for one in told)]
        for one in told + answers:
            metrics = _metrics(context, one)
            context = None if context is None else context + one.tokens
            if one.message is None:
                continue
            role = _ROLES.get(str(one.message["role"]), "user")
            step = {"step_id": len(steps) + 1, "source": role, "message": _text(one.message)}
            steps.append(step | ({"metrics": metrics} if metrics else {}))
    return {
        "schema_version": "ATIF-v1.4",
        "session_id": name,
        "agent": {"name": "rlskip", "version": __version__},
        "steps": steps,
        "extra": {**session.place, "group": session.group, "reward": session.reward},
    }


def _metrics(context: list[int] | None, one: Said) -> dict[str, Any]:
    """The tokens of an answer, from the first that was sampled, and those before them."""
    if not one.sampled or True not in one.mask:
        return {}
    first = one.mask.index(True)
    before = None if context is None else context + one.tokens[:first]
    metrics = {
        "prompt_tokens": len(before or ()),
        "completion_tokens": len(one.tokens) - first,
        "prompt_token_ids": before,
        "completion_token_ids": one.tokens[first:],
        "logprobs": _known(one.log_probs[first:]),
    }
    return {key: value for key, value in metrics.items() if value is not None}


def _known(log_probs: list[float | None]) -> list[float | None] | None:
    """These log-probs if all are known."""
    return log_probs if all(p is not None and p == p for p in log_probs) else None


def write_verl_text(target: Scope, out: Path) -> Iterator[Path]:
    """Write ``{step}.jsonl`` below `out`, as verl's ``rollout_data_dir`` has them."""
    for step, sessions in groupby(target.sessions(), lambda one: one.place["step"]):
        file = out / f"{step}.jsonl"
        lines = [line(_as_verl_text(session)) + "\n" for session in sessions]
        out.mkdir(parents=True, exist_ok=True)
        with open(file, "x", encoding="utf-8") as opened:
            opened.writelines(lines)
        yield file


def _as_verl_text(session: SessionRows) -> dict[str, Any]:
    messages = _messages(session)
    at = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    texts = list(map(_text, messages))
    before, after = "\n".join(texts[:at]), "\n".join(texts[at:])
    truth = session.turns[0].get("gts")
    about = {"gts": truth, "score": session.reward, "step": session.place["step"]}
    return {"input": before, "output": after, **about, "request_id": _name(session)}


def _text(message: Mapping[str, Any]) -> str:
    """What a message says, or the tools that it calls instead."""
    content = message.get("content")
    said = message.get("tool_calls") or "" if content is None else content
    return said if isinstance(said, str) else json.dumps(finite(said), ensure_ascii=False)


def traces(target: Scope) -> Iterator[str]:
    """A line for each session, an episode as verifiers saves it in ``traces.jsonl``."""
    for session in target.sessions():
        name, place = _name(session), session.place
        messages = session.messages or []
        first = next((str(m.get("content")) for m in messages if m["role"] == "user"), None)
        task = {"type": "Task", "data": {"id": session.group, "prompt": first}}
        reward = None if session.reward is None else {"score": session.reward, "weight": 1.0}
        work = {"type": "train", "step": place["step"]}
        yield line(
            {
                "id": name,
                "env": {"id": "rlskip"},
                "task": task,
                "group": {"id": _group(session)},
                "run": {"type": "train", "id": str(place.get("run", "rlskip")), "work": work},
                "ok": True,
                "traces": [
                    {
                        "id": name,
                        "task": task,
                        "agent": {"config": {}},
                        "nodes": list(_nodes(session)),
                        "rewards": {"reward": reward},
                        "is_completed": True,
                        "ok": True,
                    }
                ],
            }
        )


def _nodes(session: SessionRows) -> Iterator[dict[str, Any]]:
    """A node for each message, with the tokens that it adds."""
    every = [one for told, answers in session.said for one in (*told, *answers)]
    for i, one in enumerate(every):
        unknown = {"role": "assistant" if one.sampled else "user", "content": ""}
        node: dict[str, Any] = {"parent": i - 1 if i else None, "message": one.message or unknown}
        node["sampled"] = one.sampled
        if one.tokens:
            sampled = [p for p, flag in zip(one.log_probs, one.mask, strict=True) if flag]
            node |= {"token_ids": one.tokens, "mask": one.mask, "logprobs": _known(sampled) or []}
        yield node


def _messages(session: SessionRows) -> list[dict[str, Any]]:
    found = session.messages
    if found is None:
        what = "it records no chat messages, and token ids are not text"
        raise ExportError(what, _name(session), "give the tokenizer: --tokenizer DIRECTORY")
    return found


def _group(session: SessionRows) -> str:
    """The name of its group: those of several calls or ranks of a step may have one name."""
    place = session.place
    call = "" if place.get("call") is None else f"{place['call']}-"
    rank = f"r{place['rank']}-" if "rank" in place else ""
    return f"{call}{rank}{session.group}"


def _name(session: SessionRows) -> str:
    """The session's name: step, group and number, safe for a file."""
    return safe_name(f"{session.place['step']}-{_group(session)}-{session.number}")
