"""The records of one step of a job, read a value at a time."""

from __future__ import annotations

import functools
import operator
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs
import numpy as np

from rlskip.batch.row_parts import Layout
from rlskip.stages.parts import NUMBER, ROW_COLUMNS


class Part(Protocol):
    """A part of a step, as :mod:`rlskip.stages.parts` has it, on disk or in memory."""

    def load(self, *, into: Any, fields: Sequence[str]) -> Any: ...


@attrs.frozen(eq=False)
class Record:
    """One record; its value is read when it is needed.

    ``order`` is its place among the records of its step and process, ``number`` the value of a
    number or a text, ``layout`` where in any other value each row's part is. ``keys`` and
    ``sessions`` are as :mod:`rlskip.stages.parts` has them.
    """

    name: str
    order: int
    rank: int
    form: str
    dtype: str
    number: Any
    keys: np.ndarray | None
    sessions: np.ndarray | None
    layout: Layout
    source: Part
    field: str

    @property
    def has_rows(self) -> bool:
        return self.keys is not None

    def load(self) -> Any:
        """The value: an array, or a digest's mapping of arrays; raises DumpError."""
        return self.source.load(into="numpy", fields=[self.field])[self.field]


@attrs.frozen(eq=False)
class RowTable:
    """The rows of a step by key, ascending; hashes and lengths as arrays."""

    keys: np.ndarray
    prompts: np.ndarray
    masks: np.ndarray
    prompt_lengths: np.ndarray
    lengths: np.ndarray
    sessions: np.ndarray  # -1 where the batch has none
    turns: np.ndarray
    source: np.ndarray  # which of the step's dumps describes the row, and where in it
    place: np.ndarray
    groups: np.ndarray  # the names of their prompts, where they have some: else empty

    def find(self, keys: np.ndarray) -> np.ndarray:
        """The place of each key in the table, where it must be."""
        return np.searchsorted(self.keys, keys)


class StepRecords:
    """What a job recorded at one step; raises DumpError where a part cannot be read."""

    def __init__(self, dumps: Sequence[Part]) -> None:
        self._dumps = list(dumps)
        records, parts = [], []
        for dump in self._dumps:
            index = dump.load(into="numpy", fields=["index"])["index"]
            small = _small_fields(index)
            part = dump.load(into="numpy", fields=small)
            records += [_record(dump, i, item, part) for i, item in enumerate(index)]
            parts.append(part)
        records.sort(key=lambda record: (record.order, record.rank))
        self.stages: dict[str, list[Record]] = {}
        for record in records:
            self.stages.setdefault(record.name, []).append(record)
        self.rows = _rows_in(parts)
        # Of which dump the tokens are in memory, and these: most rows of a step are in one.
        self._tokens: tuple[int, dict[str, Any]] = -1, {}

    @property
    def tokens(self) -> int:
        """Tokens of all rows of the step."""
        return 0 if self.rows is None else int(self.rows.lengths.sum())

    def tokens_of(self, at: int) -> tuple[np.ndarray, np.ndarray] | None:
        """The tokens of a row of the table, and which were sampled; None of digests."""
        assert self.rows is not None
        part = self._tokens_in(int(self.rows.source[at]))
        if part["rows.tokens"] is None:
            return None
        place = int(self.rows.place[at])
        end = int(part["rows.ends"][place])
        span = slice(end - int(part["rows.lengths"][place]), end)
        return part["rows.tokens"][span], part["rows.sampled"][span]

    def _tokens_in(self, source: int) -> dict[str, Any]:
        if self._tokens[0] != source:
            names = ["rows.lengths", "rows.tokens", "rows.sampled"]
            part = self._dumps[source].load(into="numpy", fields=names)
            self._tokens = source, {**part, "rows.ends": np.cumsum(part["rows.lengths"])}
        return self._tokens[1]


_OF_ROWS = ("keys", "sessions", "spans")


def _small_fields(index: Sequence[Mapping[str, Any]]) -> list[str]:
    found = [f"rows.{name}" for name in ROW_COLUMNS]
    return found + [f"{i}.{name}" for i in range(len(index)) for name in _OF_ROWS]


def _record(dump: Part, i: int, item: Mapping[str, Any], part: Mapping[str, Any]) -> Record:
    return Record(
        name=item["name"],
        order=item["order"],
        rank=item["rank"],
        form=item["form"],
        dtype=item["dtype"],
        number=item["value"] if item["form"] == NUMBER else None,
        keys=part[f"{i}.keys"],
        sessions=part[f"{i}.sessions"],
        layout=Layout(item["align"], part[f"{i}.spans"], item["flat"]),
        source=dump,
        field=f"{i}",
    )


def _rows_in(parts: Sequence[Mapping[str, Any]]) -> RowTable | None:
    """The rows that the parts of a step describe, each once."""
    columns: dict[str, list[np.ndarray]] = defaultdict(list)
    for number, part in enumerate(parts):
        if part["rows.keys"] is None:
            continue
        n = len(part["rows.keys"])
        for name in ROW_COLUMNS:
            column = part[f"rows.{name}"]
            columns[name].append(np.full(n, -1, np.int64) if column is None else column)
        named = part.get("rows.groups")
        columns["groups"].append(np.full(n, "") if named is None else named)
        columns["source"].append(np.full(n, number))
        columns["place"].append(np.arange(n))
    if not columns:
        return None
    joined = {name: np.concatenate(some) for name, some in columns.items()}
    _, first = np.unique(joined["keys"], return_index=True)
    return RowTable(**{name: column[first] for name, column in joined.items()})


def is_single(record: Record, value: np.ndarray) -> bool:
    """Whether a value has one number for each row."""
    return record.layout.spans is None and value.size == len(value)


def single_values(record: Record, value: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """One number for each of some rows: the row's own, what its tokens share, else their sum."""
    if is_single(record, value):
        return np.asarray(value.reshape(-1)[rows])
    parts = (record.layout.part(value, row) for row in rows.tolist())
    shared = [part.flat[0] if part.size and (part == part.flat[0]).all() else part.sum()
              for part in parts]  # fmt: skip
    return np.array(shared, value.dtype)


# -- which rows of two stages belong together, wherever the batches put them --------------------


Pair = tuple[int, int, int, int]
"""The record and the row in it, of A, then of B."""


def pair_rows(a: Sequence[Record], b: Sequence[Record]) -> tuple[list[Pair], int, int]:
    """Rows of A and of B that are the same row, and how many rows each has that the other lacks.

    Rows with equal tokens are paired, first those of one session where both sides number sessions:
    the same session may have another number in the other run. Where a row was recorded several
    times, or several sessions have the same tokens, the first is paired with the first.
    """
    mine, theirs = _named_rows(a), _named_rows(b)
    pairs: list[Pair] = []
    by_session = all(record.sessions is not None for record in (*a, *b))
    for parts in (2, 1)[not by_session :]:  # of the name: key and session, or the key
        waiting: dict[Any, deque[tuple[int, int]]] = defaultdict(deque)
        for place, name in theirs.items():
            waiting[name[:parts]].append(place)
        for place, name in [*mine.items()]:
            if same := waiting[name[:parts]]:
                pairs.append((*place, *same[0]))
                del mine[place], theirs[same.popleft()]
    return sorted(pairs), len(mine), len(theirs)


def _named_rows(records: Sequence[Record]) -> dict[tuple[int, int], tuple[int, int | None]]:
    """Key and session of each row of a stage, by the record and the place in it."""
    found: dict[tuple[int, int], tuple[int, int | None]] = {}
    for number, record in enumerate(records):
        assert record.keys is not None
        keys, given = record.keys.tolist(), record.sessions
        sessions = [None] * len(keys) if given is None else given.tolist()
        for row, name in enumerate(zip(keys, sessions, strict=True)):
            found[number, row] = name
    return found


def copies(a: StepRecords, b: StepRecords) -> tuple[Counter[int], Counter[int]]:
    """How many rows of each key there are in A, and in B, which both have rows.

    A stage may have all of them once an epoch: of the stages of rows that both recorded, the one
    with the fewest tells; and each row that is described is there once.
    """
    shared = a.stages.keys() & b.stages.keys()
    named = [n for n in shared if all(one.has_rows for one in (*a.stages[n], *b.stages[n]))]
    found: list[Counter[int]] = []
    for side in (a, b):
        assert side.rows is not None
        every = [_counts(side.stages[name]) for name in named]
        fewest: Counter[int] = functools.reduce(operator.and_, every) if every else Counter[int]()
        once: Counter[int] = Counter(side.rows.keys.tolist())
        found.append(fewest | once)
    return found[0], found[1]


def _counts(records: Sequence[Record]) -> Counter[int]:
    return Counter(key for one in records if one.keys is not None for key in one.keys.tolist())
