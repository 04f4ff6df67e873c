"""A dump's columns, read from its open file: all of them, or what some fields of rows need."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from rlskip.batch.ragged import holds_numbers
from rlskip.batch.row_fields import CONVENTION, RowFields
from rlskip.format.codec import Node
from rlskip.format.container import Reader
from rlskip.format.dump_errors import DAMAGE, CorruptDumpError, DumpError
from rlskip.format.kinds import array_of, choosable, is_flat, length_of, rebuild
from rlskip.runs.columns import QUEUE_PART, Columns, rollout_columns
from rlskip.runs.rollouts import NAMING, PLACE, ROW, TEXTS, TOKENS, column_of
from rlskip.store.meta import DumpMeta

_TREE, _FIELDS = "rollouts", "fields"
_SIZED = ("tensordict", "dataproto")  # they say how many rows they have
# Most of a dump, which stays as narrow as the file has it.
_NARROW = ("prompt", "response", "whole", "attention", "prompt_mask", "mask")


def fields_of(reader: Reader) -> dict[str, Node]:
    """The fields of the rollouts, with their nodes; none of rows with fields of their own."""
    try:
        nodes = choosable(reader.index[_TREE])
        if nodes.keys() == QUEUE_PART:
            # A tree of its own: its columns can be chosen, unless it is a lazy stack.
            reader.index[_FIELDS], columns = nodes["fields"], choosable(nodes["fields"])
            return {"key": nodes["keys"], **columns} if columns else {}
    except DAMAGE as error:
        what = "its index does not fit together"
        raise CorruptDumpError(what, reader.where) from error
    return nodes


def read_columns(reader: Reader, meta: DumpMeta, fields: Sequence[str] | None) -> Columns:
    """The columns of a dump, verified: all, or those that `fields` need; raises DumpError."""
    nodes, described = fields_of(reader), RowFields.from_meta(meta)
    known = described or RowFields.of(nodes)
    narrow = (nodes.get(getattr(known, what)) for what in _NARROW)
    reader.narrow = {number for node in narrow if (number := array_of(node)) is not None}
    if fields is not None and nodes:
        _check(fields, list(nodes), reader.where)
        some = _read_some(reader, nodes, known, _needed(fields, nodes, known))
        if some is not None:
            return some
    columns = rollout_columns(rebuild(reader, _TREE, None, "numpy"), described)
    if fields is not None and not nodes:
        _check(fields, [*columns.columns, *columns.whole], reader.where)
    return columns


def _read_some(
    reader: Reader, nodes: Mapping[str, Node], known: RowFields, wanted: Sequence[str]
) -> Columns | None:
    """The `wanted` columns; None where they are not the same among all columns, or may not be."""
    is_queue = _FIELDS in reader.index
    counted = [name for name in (known.response, known.whole) if name and name in nodes]
    n = None
    if reader.index[_FIELDS if is_queue else _TREE][0] not in _SIZED:
        lengths = (length_of(nodes[name], reader.nbytes) for name in counted)
        if (n := next((length for length in lengths if length is not None), None)) is None:
            return None
    wanted = wanted or [*counted, *nodes][:1]
    if is_queue:
        own = [name for name in wanted if name != "key"]
        keys = rebuild(reader, _TREE, ["keys"], "numpy")["keys"] if "key" in wanted else []
        part: Any = {"groups": [], "keys": keys, "fields": rebuild(reader, _FIELDS, own, "numpy")}
    else:
        part = rebuild(reader, _TREE, wanted, "numpy")
    found = rollout_columns(part, known, n)
    # Others take the place of what has the right name, but another length, or no tokens.
    named = {entry.partition(".")[0] for entry in attrs.astuple(known) if type(entry) is str}
    if not found.columns or not {*wanted} & named <= found.columns.keys():
        return None
    response = found.columns.get(known.response or "")
    return found if response is None or holds_numbers(response) else None


def _needed(fields: Iterable[str], names: Mapping[str, Node], described: RowFields) -> list[str]:
    """The columns among `names` that must be read for `fields`, keys of ROW or of their own."""
    chosen: list[str] = []
    for field in fields:
        itself = column_of(field, names)
        chosen += [itself] if itself in names and field not in ROW else []
        what = "reward" if field in (described.reward, *CONVENTION["reward"]) else field
        chosen += _columns_of(what, names, described)
    return list(dict.fromkeys(chosen))


def _columns_of(field: str, names: Mapping[str, Node], described: RowFields) -> list[str]:
    """The columns that one key of ROW is made of."""

    def of(*whats: str) -> list[str]:
        entries = (getattr(described, what) for what in whats)
        columns = (entry.partition(".")[0] for entry in entries if entry is not None)
        return [name for name in columns if name in names]

    field = TEXTS.get(field, field)
    # Rewards may be one a token, if they fit them.
    rewards = of("reward") if field == "reward" else []
    if field in TOKENS or not all(is_flat(names[name]) for name in rewards):
        tokens = of("prompt", "response", field) if of("response") else of("whole", field)
        return tokens + of("attention", "prompt_mask", "mask")
    if field in NAMING:
        if "key" in names:
            return ["key", *of("group")]
        own = of("group", "session", "turn", "last")
        known = of("group") or described.n is not None
        return own if known else own + _columns_of("prompt", names, described)
    return rewards


def _check(fields: Sequence[str], names: Sequence[str], where: str) -> None:
    own = {column_of(name, names) for name in fields if name not in (*ROW, *TEXTS, *PLACE)}
    if missing := sorted(own - {*names}):
        what = f"it has no field {', '.join(map(repr, missing))}"
        raise DumpError(what, where, f"its own fields are {', '.join(sorted(names))}")
