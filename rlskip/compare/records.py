"""The records of one step of a job, read a value at a time."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs
import numpy as np

from rlskip.batch.row_parts import Layout
from rlskip.compare.verdict import MASK, ROLLOUTS
from rlskip.stages.parts import NUMBER, ROW_COLUMNS

#: The form of the rows themselves: a hash tells whether two are equal, and their entries where not.
HASHED = "hashed"


@attrs.frozen(eq=False)
class Record:
    """One record; its value is read when it is needed.

    ``number`` is the value of a number or a text, ``layout`` where in any other value each row's
    part is. ``load`` returns the value, or raises DumpError: an array, a digest's mapping of
    arrays, or, if it is `HASHED`, a hash of each row and a function that reads the entries of one.
    ``keys``, ``sessions``, ``prompts`` and ``turns`` tell which row of another record is the same.
    """

    name: str
    order: int
    rank: int
    form: str
    dtype: str
    load: Callable[[], Any]
    number: Any = None
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
        found: np.ndarray = self.layout.part(value, row)
        return found


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
        """The rows that the parts of a step describe, each once; None where they describe none."""
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
        _, first = np.unique(every["keys"], return_index=True)
        return cls(**{name: column[first] for name, column in every.items()})

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
    """What a job recorded at one step; raises DumpError where a part cannot be read.

    Each part is read by its ``load``, as :meth:`rlskip.runs.on_disk.Dump.load` reads.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = list(parts)
        records: list[Record] = []
        described: list[dict[str, Any]] = []
        of_record = ("keys", "sessions", "spans")
        for part in self._parts:
            index = part.load(into="numpy", fields=["index"])["index"]
            small = [f"rows.{name}" for name in ROW_COLUMNS]
            small += [f"{i}.{name}" for i in range(len(index)) for name in of_record]
            known = part.load(into="numpy", fields=small)
            described.append(known)
            for i, item in enumerate(index):
                keys, sessions, spans = (known[f"{i}.{name}"] for name in of_record)
                number = item["value"] if item["form"] == NUMBER else None
                about = {name: item[name] for name in ("name", "order", "rank", "form", "dtype")}
                load = functools.partial(_value_of, part, f"{i}", number)
                layout = Layout(item["align"], spans, item["flat"])
                records.append(Record(**about, load=load, number=number, layout=layout, keys=keys,
                                      sessions=sessions))  # fmt: skip
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
        fewest = functools.reduce(operator.and_, counts) if counts else Counter[int]()
        at = np.repeat(np.arange(len(rows.keys)), [max(1, fewest[k]) for k in rows.keys.tolist()])

        def entries(row: int, which: int) -> np.ndarray | None:
            tokens = self.tokens_of(int(at[row]))
            return None if tokens is None else tokens[which]

        tokens, sampled = (functools.partial(entries, which=which) for which in (0, 1))
        keys, masks = rows.keys[at], rows.masks[at]
        rollouts = Record(
            ROLLOUTS, -2, 0, HASHED, "", lambda: (keys, tokens), keys=keys,
            prompts=rows.prompts[at], sessions=rows.sessions[at], turns=rows.turns[at],
        )  # fmt: skip
        mask = Record(MASK, -1, 0, HASHED, "", lambda: (masks, sampled), keys=keys)
        return [[rollouts], [mask]]

    def tokens_of(self, at: int) -> tuple[np.ndarray, np.ndarray] | None:
        """The tokens of a row of the table, and which were sampled; None of digests."""
        assert self.rows is not None
        source, place = int(self.rows.source[at]), int(self.rows.place[at])
        if self._tokens[0] != source:
            names = ["rows.lengths", "rows.tokens", "rows.sampled"]
            part = self._parts[source].load(into="numpy", fields=names)
            self._tokens = source, {**part, "rows.ends": np.cumsum(part["rows.lengths"])}
        part = self._tokens[1]
        if part["rows.tokens"] is None:
            return None
        end = int(part["rows.ends"][place])
        span = slice(end - int(part["rows.lengths"][place]), end)
        return part["rows.tokens"][span], part["rows.sampled"][span]


def _value_of(part: Any, field: str, number: Any) -> Any:
    if number is not None:
        return np.array([number])
    return part.load(into="numpy", fields=[field])[field]
