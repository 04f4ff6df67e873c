"""The rollouts of one dump: rows, and the sessions and groups that these belong to."""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import attrs
import numpy as np

from rlskip._human import finite
from rlskip.batch.columns import column_length
from rlskip.batch.decoding import Decode
from rlskip.batch.tables import Ragged
from rlskip.format.dump_errors import DumpError
from rlskip.runs.columns import (
    Column,
    Columns,
    Tokens,
    plain,
    row_names,
    single,
    total_of,
    values,
)
from rlskip.runs.conversation import Conversation, Piece, messages_of, pieces_of

log = logging.getLogger(__name__)

TOKENS = ("prompt", "response", "mask", "log_probs")
NAMING = ("group", "session", "turn", "uid")
ROW = ("row", *NAMING, *TOKENS, "reward")
"""What every row has, whatever the run calls its columns; None where the run has no such column."""
PLACE = ("run", "step", "call", "rank")
"""What a row says of where it is, as far as that differs."""
TEXTS = {"prompt_text": "prompt", "response_text": "response"}


@attrs.frozen
class SessionRows:
    """One sampled attempt at a prompt: its rows, in the order of its turns.

    ``number`` counts the sessions of its group from 0. ``rows`` are its rows' numbers in the dump.
    ``reward`` and ``length``, in tokens, are sums over the responses; None where not known.
    """

    group: str
    number: int
    rows: list[int]
    reward: float | None
    length: int | None
    _rollouts: Rollouts = attrs.field(repr=False, eq=False)

    @property
    def place(self) -> Mapping[str, Any]:
        """Where it is: ``step``, ``call``."""
        return self._rollouts.place

    @property
    def where(self) -> str:
        """Its step and its group, in words."""
        return f"step {self.place['step']}, group {self.group}"

    @property
    def turns(self) -> list[dict[str, Any]]:
        """Its rows, as mappings."""
        return [self._rollouts.row(i) for i in self.rows]

    @property
    def pieces(self) -> list[Piece]:
        rows = self._rollouts.tokens.rows
        return pieces_of(self.turns, [rows is not None and i in rows.unknown for i in self.rows])

    @property
    def conversation(self) -> Conversation | None:
        """The tokens of all turns in one piece; None if no column holds tokens."""
        return Conversation.of(self.pieces)

    @property
    def messages(self) -> list[dict[str, Any]] | None:
        """Its chat messages, with ``role`` and ``content``.

        None where the run recorded none and is opened without a tokenizer.
        """
        return messages_of(self.turns, self._rollouts.decode)


@attrs.frozen
class Group:
    """The sessions of one prompt."""

    name: str
    sessions: list[SessionRows]

    @property
    def mean_reward(self) -> float | None:
        found = [one.reward for one in self.sessions if one.reward is not None]
        return finite(fmean(found)) if found else None


@attrs.define(eq=False, repr=False, slots=False)
class Rollouts:
    """What a stage returned, read: rows as mappings, sessions, groups.

    Rows of one prompt's attempt are one session, whatever the trainer calls them. `told` has the
    fields of which it was said that they do not fit their tokens.
    """

    columns: Columns
    place: dict[str, Any] = attrs.field(factory=dict)
    fields: Sequence[str] | None = None
    decode: Decode | None = None
    _told: set[str] = attrs.field(factory=set)
    _values: dict[str, Sequence[Any]] = attrs.field(factory=dict, init=False)

    def __len__(self) -> int:
        return self.columns.n

    @functools.cached_property
    def tokens(self) -> Tokens:
        found = Tokens.of(self.columns)
        for odd in found.misfits:
            if odd.name not in self._told:
                self._told.add(odd.name)
                log.warning(
                    "rlskip: step %s: %s: what does not fit is read as None (said once)",
                    self.place.get("step", "?"), odd,
                )  # fmt: skip
        return found

    @property
    def has_tokens(self) -> bool:
        return self.tokens.response is not None

    @functools.cached_property
    def rewards(self) -> list[float | None]:
        """Of each row, summed over its tokens; None where it is missing, not finite or odd."""
        return [*map(finite, self.totals)]

    @functools.cached_property
    def totals(self) -> list[float | None]:
        """The rewards, with those that are not finite."""
        odd = {one.row for one in self.tokens.misfits if one.what == "reward"}
        cells = self.columns.of("reward") or [None] * len(self)
        spans = self.tokens.rewards or [None] * len(self)
        pairs = enumerate(zip(cells, spans, strict=True))
        return [None if i in odd else total_of(cell, span) for i, (cell, span) in pairs]

    @property
    def sessions(self) -> list[SessionRows]:
        """In the order of their first rows; :mod:`rlskip.runs.columns` has which rows are one."""
        return [SessionRows(*one, self) for one in self._sessions]

    @functools.cached_property
    def _sessions(self) -> list[tuple[str, int, list[int], float | None, int | None]]:
        """What each session is, without a reference to this object.

        Such a circle would keep a dump in memory until Python's garbage collector runs.
        """
        found: dict[tuple[str, Any], list[tuple[Any, int]]] = {}
        for i, (group, session, turn) in enumerate(row_names(self.columns, self.tokens)):
            found.setdefault((group, session), []).append((turn, i))
        lengths = list(map(len, self.tokens.response or ()))
        count, sessions = Counter[str](), []
        for (group, _), named in found.items():
            rows = [i for _, i in sorted(named)]
            earned = [reward for i in rows if (reward := self.rewards[i]) is not None]
            reward = finite(math.fsum(earned)) if earned else None
            length = sum(lengths[i] for i in rows) if lengths else None
            sessions.append((group, count[group], rows, reward, length))
            count[group] += 1
        return sessions

    @property
    def groups(self) -> list[Group]:
        """In the order of their first rows."""
        found: dict[str, list[SessionRows]] = {}
        for one in self.sessions:
            found.setdefault(one.group, []).append(one)
        return [Group(name, sessions) for name, sessions in found.items()]

    def row(self, i: int) -> dict[str, Any]:
        """Row `i`: where it is, the keys of ROW, texts where tokens can be decoded, and others."""
        return self.place | {name: self.cell(name, i) for name in self.names}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.row, range(len(self)))

    @functools.cached_property
    def names(self) -> list[str]:
        """The keys of a row, besides its place."""
        if self.fields is None:
            texts = TEXTS if self.decode is not None and self.has_tokens else ()
            return [*ROW, *texts, *self.others]
        names, columns = ["row"], self.columns.columns
        for field in self.fields:
            # Of a mapping of columns those of its entries.
            within = [name for name in columns if name.startswith(f"{field}.")]
            if field not in self.place and (field not in PLACE or field in columns):
                names += [field] if field in columns or field in ROW or not within else within
        return list(dict.fromkeys(names))

    @functools.cached_property
    def others(self) -> dict[str, Column]:
        """Columns other than those of ROW; single values of the whole batch are in every row.

        Where one has the name of another key of the rows, and other values, it is ``own_{name}``.
        """
        found: dict[str, Column] = {}
        held, earned, spans = self._held(), self.columns.name_of("reward"), self.tokens.rewards
        single = {
            name: [plain(value)] * len(self)
            for name, value in self.columns.whole.items()
            if name not in ("meta_info", "groups") and column_length(value) is None
        }
        for name, column in (single | dict(self.columns.columns)).items():
            if name in held:
                continue
            if name == earned and any(spans):  # without padding, as their tokens
                pairs = zip(values(column), spans, strict=True)
                cells = [cell if span is None else cell[slice(*span)] for cell, span in pairs]
                column = Ragged(cells) if isinstance(column, np.ndarray) else cells
            if name in self.place or name in (*ROW, *TEXTS):
                known = [self.cell(name, i) for i in range(len(self))]
                if known == list(map(plain, values(column))):
                    continue
                name = f"own_{name}"
            found[name] = column
        return found

    def _held(self) -> set[str | None]:
        """The columns of which rows have everything but padding."""
        columns, tokens = self.columns, self.tokens
        held = [what for what in TOKENS if getattr(tokens, what) is not None]
        held += ["attention", "prompt_mask"] if held else []
        reward = columns.array("reward")
        held += ["reward"] if reward is not None and reward.ndim == 1 else []
        found = (columns.array(what) for what in ("prompt", "response", "whole"))
        parts = [part for part in found if part is not None and part.ndim == 2]
        if {"prompt", "response"} <= {*held} and len(parts) == 3:
            # verl's input_ids are both, with the padding between them.
            both = np.concatenate(parts[:2], 1)
            held += ["whole"] if np.array_equal(both, parts[2]) else []
        elif tokens.response is not None and columns.name_of("response") is None:
            held.append("whole")  # the rows are cut from it
        return {columns.name_of(what) for what in held} - {odd.name for odd in tokens.misfits}

    def cell(self, name: str, i: int) -> Any:
        """What row `i` has under a key."""
        if name in self.place:
            return self.place[name]
        if name == "row":
            return i
        if name == "reward":
            return self.rewards[i]
        if name in NAMING:
            return self._naming[name][i]
        if name in TOKENS:
            cells = getattr(self.tokens, name)
            if cells is None or cells[i] is None:
                return None
            return ((cells[i] != 0).astype(int) if name == "mask" else cells[i]).tolist()
        if name in TEXTS:
            cells = getattr(self.tokens, TEXTS[name])
            return None if cells is None or not self.decode else self.decode(cells[i].tolist())
        if name not in self._values:
            self._values[name] = values(self.column(name))
        return plain(self._values[name][i])

    def column(self, name: str) -> Column:
        """A column by its own name, or its name among the `others`; raises DumpError without."""
        columns = self.columns.columns
        for found in (self.others.get(name), columns.get(name), columns.get(column_of(name, ()))):
            if found is not None:
                return found
        where = f"step {self.place.get('step')}"
        raise DumpError(f"its field {name!r} has no value for each row", where)

    @functools.cached_property
    def _naming(self) -> dict[str, list[Any]]:
        """Group, session, turn and uid of each row."""
        found: dict[str, list[Any]] = {name: [None] * len(self) for name in NAMING}
        for group, number, rows, _, _ in self._sessions:
            for turn, i in enumerate(rows):
                found["group"][i], found["session"][i], found["turn"][i] = group, number, turn
        uids = self.columns.of("group")
        found["uid"] = found["group"] if uids is None else [str(single(uid)) for uid in uids]
        return found


def column_of(field: str, names: Collection[str]) -> str:
    """The column that a field is: ``extra`` of ``extra.score``, ``prompt`` of ``own_prompt``."""
    if field in names:
        return field
    own = field.removeprefix("own_")
    return own if own in (*ROW, *PLACE, *TEXTS) else field.partition(".")[0]
