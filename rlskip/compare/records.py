"""The records of one step, a value at a time: what a job recorded, or the rollouts of dumps."""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs
import numpy as np

from rlskip.batch.rows import Layout, by_token
from rlskip.compare.verdict import MASK, ROLLOUTS
from rlskip.runs.on_disk import Dump
from rlskip.runs.rollouts import Rollouts
from rlskip.stages.parts import NUMBER, ROW_COLUMNS, ROWS

Part = dict[str, Any]
"""A part of a step in memory."""

#: The form of the rows themselves: a hash tells whether two are equal, and their entries where not.
HASHED = "hashed"


@attrs.frozen(eq=False)
class Record:
    """One record; its value is read when it is needed.

    ``layout`` is where in the value each row's part is. ``load`` returns it, or raises DumpError:
    an array, a digest's mapping of arrays, or, if it is `HASHED`, a hash of each row and a function
    that reads the entries of one.
    ``keys``, ``sessions``, ``prompts`` and ``turns`` tell which row of another record is the same.
    """

    name: str
    order: int
    rank: int
    form: str
    dtype: str
    load: Callable[[], Any]
    layout: Layout = attrs.field(factory=Layout)
    keys: np.ndarray | None = None
    sessions: np.ndarray | None = None
    prompts: np.ndarray | None = None
    turns: np.ndarray | None = None

    @property
    def has_rows(self) -> bool:
        return self.keys is not None

    def is_single(self, value: np.ndarray) -> bool:
        """Whether its value has one number for each row."""
        return self.layout.spans is None and value.size == len(value)

    def part(self, value: np.ndarray, row: int) -> np.ndarray:
        """What belongs to a row: one number if it is single. The value itself without rows."""
        if not self.has_rows:
            return value
        if self.is_single(value):
            return value.reshape(-1)[row : row + 1]
        return self.layout.part(value, row)

    def by_token(
        self, value: np.ndarray, row: int, prompt_length: int, sampled: np.ndarray
    ) -> np.ndarray:
        """One float64 for each token of a row, NaN where it has none.

        A number for the row is that of each token that was `sampled`.
        """
        part = self.part(value, row)
        if self.layout.align is None and self.is_single(value):
            return np.where(sampled, float(part[0]), np.nan)
        return by_token(part, self.layout.align, prompt_length, sampled)


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
    groups: np.ndarray  # the names of their prompts, where they have some: else empty
    source: np.ndarray  # which of the step's parts describes the row, and where in it
    place: np.ndarray

    @classmethod
    def of(cls, parts: Sequence[dict[str, Any]]) -> RowTable | None:
        """The rows that the parts of a step describe; None where they describe none."""
        found = []
        for number, part in enumerate(parts):
            if part["rows.keys"] is not None:
                n = len(part["rows.keys"])
                columns = {name: part.get(f"rows.{name}") for name in (*ROW_COLUMNS, "groups")}
                for name, absent in (("sessions", -1), ("turns", -1), ("groups", "")):
                    if columns[name] is None:
                        columns[name] = np.full(n, absent)
                found.append({**columns, "source": np.full(n, number), "place": np.arange(n)})
        if not found:
            return None
        every = {name: np.concatenate([one[name] for one in found]) for name in found[0]}
        _, chosen = np.unique(np.stack([every["keys"], every["masks"]]), axis=1, return_index=True)
        if any("rows.groups" in part for part in parts):  # of dumps: no two describe one row
            chosen = np.argsort(every["keys"], kind="stable")
        return cls(**{name: column[chosen] for name, column in every.items()})

    def find(self, keys: Any) -> Any:
        """The place of each key in the table, where it must be."""
        return np.searchsorted(self.keys, np.asarray(keys, np.uint64))

    def name(self, at: int) -> str:
        """The name of a row: its prompt's is a hash if it has no group."""
        group = self.groups[at]
        named = [f"group {group}" if group else f"prompt {f'{int(self.prompts[at]):016x}'[:8]}"]
        for what, n in (("session", self.sessions[at]), ("turn", self.turns[at])):
            named += [f"{what} {n}"] if n >= 0 else []
        return ", ".join(named)


class StepRecords:
    """What was recorded at one step; raises DumpError where a part of it cannot be read."""

    def __init__(self, parts: Sequence[Dump | Part]) -> None:
        self._parts = list(parts)
        records: list[Record] = []
        described: list[dict[str, Any]] = []
        of_record = ("keys", "sessions", "spans")
        for part in self._parts:
            index = _read(part, ["index"])["index"]
            small = [f"rows.{name}" for name in ROW_COLUMNS]
            small += [f"{i}.{name}" for i in range(len(index)) for name in of_record]
            known = _read(part, small)
            described.append(known)
            for i, item in enumerate(index):
                keys, sessions, spans = (known[f"{i}.{name}"] for name in of_record)
                number = item["value"] if item["form"] == NUMBER else None
                about = {name: item[name] for name in ("name", "order", "rank", "form", "dtype")}
                load = functools.partial(_value_of, part, f"{i}", number)
                layout = Layout(item["align"], spans, item["flat"])
                records.append(
                    Record(**about, load=load, layout=layout, keys=keys, sessions=sessions)
                )
        records.sort(key=lambda record: (record.order, record.rank))
        self.stages: dict[str, list[Record]] = {}
        for record in records:
            self.stages.setdefault(record.name, []).append(record)
        self.rows = RowTable.of(described)
        # Of which part the tokens are in memory, and these: most rows of a step are in one.
        self._tokens: tuple[int, dict[str, Any]] = -1, {}

    def rollouts(self, stages: Collection[str]) -> list[list[Record]]:
        """The rows themselves as two stages: their tokens, and which of these were sampled.

        A row is there as often as in the one of `stages`, which have rows, that has the fewest of
        it: another one may have each row once an epoch.
        """
        rows = self.rows
        if rows is None:
            return []
        counts: list[Counter[int]] = [
            Counter(np.concatenate([one.keys for one in self.stages[name]]).tolist())
            for name in stages
        ]
        own = Counter(keys := rows.keys.tolist())
        fewest = functools.reduce(operator.and_, counts or [own])
        # Those of equal tokens and other masks in turn.
        nth = (np.arange(len(keys)) - rows.find(keys)).tolist()
        often = [-((n - max(1, fewest[key])) // own[key]) for n, key in zip(nth, keys, strict=True)]
        at = np.repeat(np.arange(len(keys)), often)

        def entries(row: int, which: int) -> np.ndarray | None:
            tokens = self.tokens_of(int(at[row]))
            return None if tokens is None else tokens[which]

        tokens, sampled = (functools.partial(entries, which=which) for which in (0, 1))
        names, masks = rows.keys[at], rows.masks[at]
        rollouts = Record(
            ROLLOUTS, -2, 0, HASHED, "", lambda: (names, tokens), keys=names,
            prompts=rows.prompts[at], sessions=rows.sessions[at], turns=rows.turns[at],
        )  # fmt: skip
        # Without prompts: masks are compared of rows whose tokens are equal.
        mask = attrs.evolve(
            rollouts, name=MASK, order=-1, load=lambda: (masks, sampled), prompts=None
        )
        return [[rollouts], [mask]]

    def tokens_of(self, at: int) -> tuple[np.ndarray, np.ndarray] | None:
        """The tokens of a row of the table, and which were sampled; None of digests."""
        assert self.rows is not None
        source, place = int(self.rows.source[at]), int(self.rows.place[at])
        if self._tokens[0] != source:
            names = ["rows.lengths", "rows.tokens", "rows.sampled"]
            part = _read(self._parts[source], names)
            self._tokens = source, {**part, "rows.ends": np.cumsum(part["rows.lengths"])}
        part = self._tokens[1]
        if part["rows.tokens"] is None:
            return None
        end = int(part["rows.ends"][place])
        span = slice(end - int(part["rows.lengths"][place]), end)
        return part["rows.tokens"][span], part["rows.sampled"][span]


def _value_of(part: Dump | Part, field: str, number: Any) -> Any:
    return _read(part, [field])[field] if number is None else np.array([number])


def _read(part: Dump | Part, fields: Sequence[str]) -> Part:
    """These fields of a part; one in memory has them, and others."""
    return part if isinstance(part, dict) else part.load(into="numpy", fields=fields)


Pair = tuple[int, int, int, int]
"""The record and the row in it, of A, then of B."""

# What names a row, the closest first: a session may have another number in the other run. Of the
# rollouts themselves rows of one prompt are paired last, whatever their tokens are.
_NAMES = (("keys", "sessions"), ("keys",), ("prompts", "sessions", "turns"), ("prompts",))


def pair_rows(
    a: Sequence[Record], b: Sequence[Record]
) -> tuple[list[Pair], list[tuple[int, int]], list[tuple[int, int]]]:
    """Rows of A and of B that are the same row, and the rows of each that the other lacks.

    Rows of one name are paired, the first with the first: several sessions may have equal tokens,
    and a row may have been recorded several times.
    """
    keys = ([one.keys for one in some if one.keys is not None] for some in (a, b))
    mine, theirs = (
        [(i, row) for i, of_one in enumerate(some) for row in range(len(of_one))] for some in keys
    )
    pairs: list[Pair] = []
    for columns in _NAMES:
        of_a, of_b = _names(a, columns), _names(b, columns)
        if not (mine and theirs and of_a and of_b):
            continue
        waiting: dict[Any, deque[tuple[int, int]]] = defaultdict(deque)
        for i, row in theirs:
            waiting[of_b[i][row]].append((i, row))
        left = []
        for i, row in mine:
            if same := waiting[of_a[i][row]]:
                pairs.append((i, row, *same.popleft()))
            else:
                left.append((i, row))
        mine, theirs = left, sorted(itertools.chain(*waiting.values()))
    return sorted(pairs), mine, theirs


def _names(records: Sequence[Record], columns: Sequence[str]) -> list[list[tuple[Any, ...]]]:
    """The names of the rows of each record, by some columns; none where one lacks a column."""
    found = [[getattr(one, column) for column in columns] for one in records]
    if any(column is None for one in found for column in one):
        return []
    return [list(zip(*(column.tolist() for column in one), strict=True)) for one in found]


class RowValues:
    """What a job recorded of the rows of one step, for the rows of some of its rollouts.

    Rows with equal tokens have the records one after the other.
    """

    def __init__(self, records: StepRecords | None, rollouts: Rollouts) -> None:
        self._value_of = functools.cache(lambda record: record.load())
        # By stage and row of the rollouts the record, and the row in it.
        self._places: dict[str, dict[int, tuple[Record, int]]] = {}
        rows = self._rows = rollouts.tokens.rows
        if records is None or rows is None:  # the rows' hashes are not needed
            return
        own = Record("", 0, 0, HASHED, "", dict, keys=rows.keys, sessions=rows.sessions)
        for name, stage in records.stages.items():
            if some := [one for one in stage if one.form == ROWS and one.has_rows]:
                pairs, _, _ = pair_rows([own], some)
                self._places[name] = {row: (some[j], other) for _, row, j, other in pairs}

    @property
    def names(self) -> list[str]:
        """The stages that have values of rows."""
        return list(self._places)

    def single(self, name: str, i: int) -> float | None:
        """A stage's value of row `i` as one number: what its tokens share, else their sum.

        None where none was recorded. Raises DumpError where it cannot be read.
        """
        if (place := self._places.get(name, {}).get(i)) is None:
            return None
        record, row = place
        part = shared = record.part(self._value_of(record), row).reshape(-1)
        given = self.by_token(name, i) if record.layout.align is not None else None
        if given is not None and self._rows is not None:
            # A value of the whole row has 0 for the prompt, and what a tool said.
            start = int(self._rows.prompt.lengths[i])
            part, shared = given, given[self._rows.sampled[i][start:]]
        is_shared = shared.size and (shared == shared[0]).all()
        return float(shared[0] if is_shared else np.nansum(part))

    def by_token(self, name: str, i: int) -> np.ndarray | None:
        """A stage's value of row `i` for each token of its response, float64, NaN without one.

        A value of the whole row is that of each sampled token. None where none was recorded;
        raises DumpError where it cannot be read.
        """
        rows, place = self._rows, self._places.get(name, {}).get(i)
        if rows is None or i in rows.unknown or place is None:
            return None
        (record, row), start = place, int(rows.prompt.lengths[i])
        return record.by_token(self._value_of(record), row, start, rows.sampled[i])[start:]
