"""Dumps as records: their rollouts are compared by the same comparer as recorded stages.

Rows are those of the dumps; log-probs and rewards are stages of them. Rows of text are compared
character by character, as if each were a token.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from rlskip.batch.row_parts import by_token
from rlskip.batch.rows import Rows
from rlskip.compare.records import Record, StepRecords
from rlskip.runs.columns import Tokens, plain, rollout_columns, values
from rlskip.runs.conversation import recorded
from rlskip.runs.rollouts import Rollouts
from rlskip.stages.parts import ROW_COLUMNS, ROWS, Entry, encode


class PartInMemory(dict[str, Any]):
    """A part of a step in memory, read as :class:`~rlskip.runs.on_disk.Dump` is."""

    def load(self, *, into: Any, fields: Sequence[str]) -> dict[str, Any]:
        return self


def characters(codes: Sequence[int]) -> str:
    """The text of rows without tokens."""
    return "".join(map(chr, codes))


def part_of(rollouts: Rollouts) -> PartInMemory:
    """The rows of a dump and their values, as :mod:`rlskip.stages.parts` has them."""
    if not len(rollouts):
        none = np.empty(0, np.int64)
        return PartInMemory({"index": [], **{f"rows.{name}": none for name in ROW_COLUMNS}})
    rows = rollouts.tokens.rows or _rows_of_text(rollouts)
    groups, sessions, turns = (
        np.array([rollouts.cell(name, i) for i in range(len(rollouts))])
        for name in ("group", "session", "turn")
    )
    rows = attrs.evolve(rows, sessions=sessions, turns=turns)
    found: dict[str, Any] = {}
    if known := [p for p in rollouts.tokens.log_probs or () if p is not None]:
        pairs = zip(rollouts.tokens.log_probs or (), rows.response.lengths.tolist(), strict=True)
        dtype = known[0].dtype
        found["log_probs"] = [np.full(n, np.nan, dtype) if p is None else p for p, n in pairs]
    if any(reward is not None for reward in rollouts.rewards):
        found["rewards"] = [np.nan if r is None else r for r in rollouts.rewards]
    entries = [
        Entry.of(name, value, rows, order=order, rank=0)
        for order, (name, value) in enumerate(found.items())
    ]
    part = encode(entries, tokens=False) | {
        **{f"rows.{name}": getattr(rows, name) for name in ROW_COLUMNS},
        "rows.groups": groups,
        "rows.tokens": rows.flat_tokens,
        "rows.sampled": rows.flat_sampled,
    }
    return PartInMemory(part)


def _rows_of_text(rollouts: Rollouts) -> Rows:
    """Rows whose tokens are the characters of their prompts and answers.

    Without a known answer a row is all that it has but its reward.
    """
    reward = rollouts.columns.name_of("reward")
    columns = {n: values(c) for n, c in rollouts.columns.columns.items()}
    found: dict[str, list[np.ndarray]] = {"prompt_ids": [], "completion_ids": []}
    for i, row in enumerate(rollouts):
        asked, said = recorded(row, "user"), recorded(row, "assistant")
        if said is None:
            known = None if rollouts.rewards[i] is None else reward
            said = repr({n: plain(cells[i]) for n, cells in columns.items() if n != known})
        for name, text in zip(found, (asked, said), strict=True):
            codes = "" if text is None else text if isinstance(text, str) else repr(text)
            found[name].append(np.array([ord(one) for one in codes], np.int64))
    rows = Tokens.of(rollout_columns(found)).rows
    assert rows is not None
    return rows


class RowValues:
    """What a job recorded of the rows of one step, for the rows of some of its rollouts.

    Rows with equal tokens have the records one after the other.
    """

    def __init__(self, records: StepRecords | None, rollouts: Rollouts) -> None:
        self._value_of = functools.cache(lambda record: record.load())
        # By stage and row of the rollouts the record, and the row in it.
        self._places: dict[str, dict[int, tuple[Record, int]]] = {}
        # The rows' hashes are not needed where nothing was recorded.
        self._rows = rollouts.tokens.rows if records is not None else None
        keys = [] if self._rows is None else self._rows.keys.tolist()
        for name, stage in ({} if records is None else records.stages).items():
            waiting: dict[int, deque[tuple[Record, int]]] = defaultdict(deque)
            for record in stage:
                if record.form == ROWS and record.keys is not None:
                    for row, key in enumerate(record.keys.tolist()):
                        waiting[key].append((record, row))
            if waiting:
                found = ((i, waiting[key].popleft()) for i, key in enumerate(keys) if waiting[key])
                self._places[name] = dict(found)

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
        record, row = place
        value, start = self._value_of(record), int(rows.prompt.lengths[i])
        part = record.part(value, row)
        if record.layout.align is None and record.is_single(value):
            return np.where(rows.sampled[i][start:], float(part[0]), np.nan)
        return by_token(part, record.layout.align, start, rows.sampled[i])[start:]
