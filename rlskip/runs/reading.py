"""A dump's columns, read from its open file: all of them, or what some fields of rows need.

Columns of tokens and masks, which are most of a dump, stay as narrow as the file stores them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlskip.batch.row_fields import CONVENTION, RowFields
from rlskip.format.codec import Node
from rlskip.format.dump_errors import DAMAGE, CorruptDumpError, DumpError
from rlskip.format.kinds import array_of, choosable, rebuild
from rlskip.runs.columns import QUEUE_PART, Columns, rollout_columns
from rlskip.runs.rollouts import PLACE, ROW, TEXTS, needed

if TYPE_CHECKING:
    from rlskip.format.container import Reader
    from rlskip.store.meta import DumpMeta

_TREE, _FIELDS = "rollouts", "fields"
_NARROW = ("prompt", "response", "whole", "attention", "prompt_mask", "mask")


def field_names(reader: Reader) -> list[str]:
    """The fields of the rollouts that can be read on their own; none where there is no choice."""
    return list(_fields(reader))


def _fields(reader: Reader) -> dict[str, Node]:
    """Those fields, with their nodes."""
    try:
        nodes = choosable(reader.index[_TREE])
        if nodes.keys() == QUEUE_PART:
            # A tree of its own: its columns can be chosen.
            reader.index[_FIELDS] = nodes["fields"]
            return {"key": nodes["keys"], **choosable(nodes["fields"])}
    except DAMAGE as error:
        what = "its index does not fit together"
        raise CorruptDumpError(what, reader.where) from error
    return nodes


def read_columns(reader: Reader, meta: DumpMeta, fields: Sequence[str] | None) -> Columns:
    """The columns of a dump, verified: all, or those that `fields` of its rows need.

    Raises
    ------
    DumpError
        It has no such field, or it cannot be used.
    """
    nodes, described = _fields(reader), RowFields.from_meta(meta)
    names, known = list(nodes), described or RowFields.of(nodes)
    narrow = (nodes.get(getattr(known, what)) for what in _NARROW)
    reader.narrow = {number for node in narrow if (number := array_of(node)) is not None}
    if fields is None:
        reader.expand_all()
        return rollout_columns(rebuild(reader, _TREE, None, "numpy"), described)
    if not names:
        columns = rollout_columns(rebuild(reader, _TREE, None, "numpy"), described)
        _check(fields, [*columns.columns, *columns.whole], reader.where)
        return columns
    _check(fields, names, reader.where)
    wanted = needed(fields, names, known) or _any(names, known)
    if _FIELDS not in reader.index:
        return rollout_columns(rebuild(reader, _TREE, wanted, "numpy"), known)
    part: dict[str, Any] = {"groups": [], "keys": []}
    if "key" in wanted:
        part["keys"] = rebuild(reader, _TREE, ["keys"], "numpy")["keys"]
    own = [name for name in wanted if name != "key"]
    part["fields"] = rebuild(reader, _FIELDS, own, "numpy")
    return rollout_columns(part, known)


def _any(names: Sequence[str], described: RowFields) -> list[str]:
    """A column that has as many values as there are rows, for its length."""
    likely = (getattr(described, what) for what in CONVENTION)
    return [next((name for name in likely if name in names), names[0])]


def _check(fields: Sequence[str], names: Sequence[str], where: str) -> None:
    own = {name.removeprefix("own_").partition(".")[0] for name in fields} - {*ROW, *TEXTS}
    if missing := sorted(own - {*names, *PLACE}):
        there = ", ".join(sorted(names))
        what = f"it has no field {', '.join(map(repr, missing))}"
        raise DumpError(what, where, f"its own fields are {there}")
