"""The prompts of a batch one by one, and which rows of a stage's result are which prompt's.

A dump records a hash of each prompt, how the first begin, and how many rows each has.
"""

from __future__ import annotations

import itertools
import json
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from rlskip._human import counted, short
from rlskip.batch.columns import (
    UIDS,
    cells_of,
    column_length,
    columns_of,
    is_data_proto,
    is_tensor,
    length_of,
    select,
    values_at,
)
from rlskip.batch.meta import plain
from rlskip.batch.row_fields import RowFields
from rlskip.batch.tables import Whole
from rlskip.format.fingerprint import VOLATILE

_MAX_TEXTS = 64
_MAX_TOKENS = 16
_MAX_CHARS = 60  # more than are shown
_SHOWN = 2
_TEXT_NAMES = ("text", "prompt", "question", "content", "messages", "raw_prompt")


@attrs.frozen
class PromptRows:
    """What a dump records of its prompts."""

    #: The hash of each (:mod:`rlskip.format.prompt_digests`).
    digests: list[str]
    #: How each of the first 64 begins: its text, or its token ids as a JSON list.
    texts: list[str]
    #: By name, that of each field that is a tensor or an array of numbers.
    dtypes: dict[str, str] = attrs.field(factory=dict)

    @classmethod
    def of(cls, prompts: Any, digests: Sequence[str]) -> PromptRows:
        """Summarize prompts whose hashes are `digests`."""
        try:
            texts = [*map(_text_of, _shown(prompts, len(digests))[:_MAX_TEXTS])]
        except Exception:  # they only serve a message
            texts = []
        dtypes = {}
        for name, column in columns_of(prompts).items():
            is_array = is_tensor(column) or isinstance(column, np.ndarray)
            if is_array and name not in VOLATILE and column.dtype != object:
                dtypes[str(name)] = str(column.dtype).removeprefix("torch.")
        return cls(list(digests), texts, dtypes)

    @classmethod
    def recorded(cls, value: Any) -> PromptRows | None:
        """What ``attrs.asdict`` made of one, from a file; None if it is something else."""
        try:
            found = cls(**value)
            is_sound = all(isinstance(text, str) for text in [*found.digests, *found.texts])
            return found if is_sound else None
        except (TypeError, AttributeError):
            return None

    def difference(self, then: PromptRows) -> str:
        """How these prompts differ from those of a dump; empty if the summaries do not show it."""
        here, there = len(self.digests), len(then.digests)
        differ = [i for i in range(min(here, there)) if self.digests[i] != then.digests[i]]
        said = []
        if here != there:
            said.append(f"{counted(here, 'prompt')} now, {there} in the dump")
        dtypes = [(n, kind, then.dtypes.get(n, kind)) for n, kind in self.dtypes.items()]
        others = [f"{n} is {now} now, {was} in the dump" for n, now, was in dtypes if now != was]
        said += others
        if others and self.texts == then.texts:  # each row has another hash for that alone
            return ", ".join(said)
        if differ and Counter(self.digests) == Counter(then.digests):
            return "the same prompts in another order"
        for i in differ[:_SHOWN]:
            row, other = (short("".join(p.texts[i : i + 1]), 50) for p in (self, then))
            how = f"differs, but both begin with {row}" if row else "differs"
            how = how if row == other else f"is {row} now, {other} in the dump"
            said.append(f"row {i} {how}")
        if len(differ) > _SHOWN:
            said.append(f"{len(differ) - _SHOWN} more rows differ")
        return ", ".join(said)


def _shown(prompts: Any, n: int) -> Sequence[Any]:
    """What shows best what each of the first of `n` prompts is: a text, if there is one."""
    columns, texts = {}, []
    for name, column in columns_of(prompts).items():
        if name not in VOLATILE and column_length(column) == n:
            columns[name] = column
            if isinstance(column, list | tuple | np.ndarray) and isinstance(column[0], str):
                texts.append(name)
    for name in (*_TEXT_NAMES, *texts, *columns):
        if name in columns:
            column = columns[name]
            is_table = is_tensor(column) and not column.is_nested
            return column[:_MAX_TEXTS].unbind() if is_table else cells_of(column, n) or ()
    return prompts if isinstance(prompts, list | tuple) else [prompts]


def _text_of(value: Any) -> str:
    """How a prompt begins."""
    if isinstance(value, Mapping):
        value = next((value[name] for name in _TEXT_NAMES if name in value), dict(value))
    if (is_tensor(value) or isinstance(value, np.ndarray)) and value.ndim:
        value = _without_padding(value)[:_MAX_TOKENS]
    value = plain(value)
    if isinstance(value, list) and {*map(type, value)} <= {int}:
        return json.dumps(value[:_MAX_TOKENS])
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):  # a conversation
        value = value[-1].get("content", value)
    return repr(value[:_MAX_CHARS]) if isinstance(value, str) else repr(value)[:_MAX_CHARS]


def _without_padding(row: Any) -> Any:
    """A row of ids from its first token that is not that of its first two places."""
    if row.ndim != 1 or len(row) < 2 or row[0] != row[1]:
        return row
    other = (row != row[0]).nonzero()
    starts = other[0] if isinstance(row, np.ndarray) else other[:, 0]
    return row[int(starts[0]) :] if len(starts) else row


def rows_per_prompt(
    result: Any, digests: Sequence[str], prompts: Any, fields: RowFields
) -> list[int] | str:
    """How many rows of a stage's result each prompt has, one's after the other's.

    The `digests` are those of the prompts. A prompt whose group the stage has dropped has none. Or
    why it is not known: the rows are neither as many as the prompts, nor do the result's fields
    tell; or the names of their groups contradict.
    """
    rows, asked = row_count(result, fields), len(digests)
    groups = (values_at(result, fields.group) if fields.group else None) or ()
    groups = [*map(plain, groups)] if len(groups) == rows else []
    ordered, counts = [], []
    for group, run in itertools.groupby(groups):
        ordered.append(group)
        counts.append(len([*run]))
    of_prompts = itertools.groupby(map(plain, prompt_groups(prompts, fields) or ()))
    names = [*map(operator.itemgetter(0), of_prompts)]
    told, wanted = [*map(repr, ordered)], [*map(repr, names)]
    known: list[int] | None = None
    if told != wanted and not {*told}.isdisjoint(wanted):
        return _of_some(told, counts, wanted, asked, fields)
    if rows is None and asked > 1:
        return f"the stage returns a {type(result).__name__}, whose rows are not known"
    if asked == 1:
        known = [1 if rows is None else rows]
    elif rows == asked:
        known = [1] * asked
    elif len(ordered) == asked and (not names or names == ordered):
        known = counts
    elif (known := _by_last(result, fields, rows, asked)) is None and fields.n is not None:
        known = [fields.n] * asked
    if known is None or (asked > 1 and sum(known) != rows):
        return (
            f"the stage returns {rows} rows for {asked} prompts, and no field tells which are "
            "whose: annotate(rows={'group': FIELD}), or {'n': ROWS_A_PROMPT} where they follow "
            "each other"
        )
    if groups and fields.group in UIDS:
        owners = itertools.chain.from_iterable(map(itertools.repeat, digests, known))
        if len({*zip(map(repr, groups), owners, strict=True)}) > len({*told}):
            return f"by {fields.group} the rows of two prompts are one group"
    return known


def _of_some(
    told: list[str], counts: list[int], wanted: list[str], asked: int, fields: RowFields
) -> list[int] | str:
    """As :func:`rows_per_prompt`, where the names of groups are not all those of the prompts."""
    if {*told} == {*wanted}:
        return (
            f"by {fields.group} the rows are in another order than the prompts: return each "
            "prompt's rows in its place"
        )
    if len(wanted) != asked or told != [name for name in wanted if name in told]:
        return f"by {fields.group} some of the rows are of other prompts"
    found = dict(zip(told, counts, strict=True))
    return [found.get(name, 0) for name in wanted]


def _by_last(result: Any, fields: RowFields, rows: int | None, asked: int) -> list[int] | None:
    """As :func:`rows_per_prompt`, by what tells the last row of each prompt."""
    last = [*map(bool, (values_at(result, fields.last) if fields.last else None) or ())]
    ends = [i for i, is_last in enumerate(last, 1) if is_last]
    if len(last) != rows or len(ends) != asked or ends[-1:] != [rows]:
        return None
    return [end - begin for begin, end in itertools.pairwise([0, *ends])]


def row_count(result: Any, fields: RowFields) -> int | None:
    """How many rows a stage's result has; None if its parts may be something else."""
    if is_tensor(result) or isinstance(result, np.ndarray):
        return column_length(result)
    columns = columns_of(result)
    for name in (fields.response, fields.whole):
        if name in columns and (rows := column_length(columns[name])) is not None:
            return rows
    return length_of(result) if isinstance(result, list) or columns else None


def prompt_groups(prompts: Any, fields: RowFields) -> Sequence[Any] | None:
    """What names each prompt's group in the result, if the prompts have it."""
    columns = columns_of(prompts)
    for name in (fields.prompt_group, *(UIDS if fields.group in UIDS else ())):
        if name in columns:
            return cells_of(columns[name])
    return None


def some_rows(rollouts: Any, fields: RowFields, rows: Sequence[int]) -> Any:
    """These rows of what a dump holds, all of it where its rows are not known: tensors are copied.

    Values for the whole batch stay.
    """
    n = row_count(rollouts, fields)
    if n is None:
        return rollouts
    if not is_data_proto(rollouts):
        return _some({"": rollouts}, rows, n)[""]
    some = select(rollouts, rows)
    some.meta_info = _some(some.meta_info, rows, n)
    return some


def _some(columns: Mapping[Any, Any], rows: Sequence[int], n: int) -> dict[Any, Any]:
    """These rows of a mapping's columns, and of the columns that its values hold.

    A list of another length stays, and is marked: as many rows as it has values may be chosen.
    """
    found = dict(columns)
    for name, column in columns.items():
        if isinstance(column, dict):
            found[name] = _some(column, rows, n)
        elif column_length(column) not in (None, n):
            found[name] = Whole(column)
    long = {name: column for name, column in columns.items() if column_length(column) == n}
    return {**found, **(select(long, rows) if long else {})}
