"""What ``rlskip.write`` is given, as plain rows with one description of their fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from rlskip._human import counted
from rlskip.batch.columns import (
    UIDS,
    column_length,
    columns_of,
    is_data_proto,
    is_tensordict,
    named,
)
from rlskip.batch.meta import plain
from rlskip.batch.padding import refuse
from rlskip.batch.ragged import numbers
from rlskip.batch.row_fields import CONVENTION, RowFields
from rlskip.errors import RlskipError
from rlskip.format.fingerprint import fingerprint
from rlskip.format.prompt_digests import DIGITS, digests_of
from rlskip.runs.columns import Tokens, rollout_columns
from rlskip.runs.rollouts import ROW, Rollouts

Row = dict[str, Any]
Groups = dict[str, list[Row]]

_ROWS, _GIVEN = "rlskip.write(rows=...)", "rlskip.write(prompts=...)"
_IDS = ("prompt", "response", "whole")
_OF_TOKENS = ("mask", "log_probs")
_PROMPTS = ("prompt", "raw_prompt", *CONVENTION["prompt"])
NAMES = {"prompt": "prompt_ids", "response": "completion_ids", "mask": "completion_mask",
         "log_probs": "logprobs"}  # fmt: skip
"""What ``rlskip.write`` calls the tokens of rows."""


class BadRowError(RlskipError, ValueError):
    """A row given to ``rlskip.write`` has no prompt or no tokens, or does not fit the others."""


def rows_of(given: Any) -> tuple[list[Row], RowFields]:
    """Copies of the rows, with tokens as lists and a uid, and what their fields hold.

    Raises BadRowError where there is no row, or one does not fit the others, and LengthError where
    values do not fit their tokens.
    """
    copies: list[Row] = []
    for i, row in enumerate(_mappings(given)):
        if not isinstance(row, Mapping):
            raise BadRowError(f"it is a {type(row).__name__}, not a mapping", f"row {i}")
        copies.append(dict(row))
        if odd := sorted(map(str, row.keys() ^ copies[0].keys())):
            what = f"it and row 0 do not both have {', '.join(odd)}"
            raise BadRowError(what, f"row {i}", "give all rows the same fields; None for no value")
    if not copies:
        raise BadRowError("there are no rows", _ROWS)
    usual = RowFields.of(copies[0])
    # Fields with a trainer's names, else those with the names that `rlskip.open` gives.
    own = {
        what: what
        for what in ("prompt", "response", *_OF_TOKENS)
        if getattr(usual, what) is None
        and any(_one_a_token(row.get(what)) is not None for row in copies)
    }
    fields = RowFields.of(copies[0], own)
    for i, row in enumerate(copies):
        _make_plain(row, fields, f"row {i}")
    _check_lengths(copies, fields)
    if any(_later_turns(copies, fields)) and not (fields.session and fields.group in UIDS):
        remedy = "give each row the uid of its prompt, and its session_id"
        raise BadRowError(f"{fields.turn} numbers the turns of sessions", "row 0", remedy)
    if fields.group in UIDS:
        return copies, fields
    for row in copies:
        row["uid"] = fingerprint(known_prompt(row))[:DIGITS]
    return copies, attrs.evolve(fields, group="uid")


def _mappings(given: Any) -> Iterable[Any]:
    """The rows of a batch or a DataFrame; anything else is a sequence of rows."""
    if is_data_proto(given) or is_tensordict(given) or isinstance(given, Mapping):
        return _of_batch(given)
    if hasattr(given, "iloc"):  # a DataFrame of pandas, whose missing values are NaN
        known = given.astype(object).where(given.notna(), None)
        return known.to_dict("records")  # type: ignore[no-any-return]
    if not isinstance(given, Iterable):
        what = f"it is a {type(given).__name__}, neither rows nor a batch"
        raise BadRowError(what, _ROWS, "give a list of mappings")
    return given


def _of_batch(batch: Any) -> list[Row]:
    """The rows of columns, without padding; tokens have the names of :data:`NAMES`."""
    rollouts = Rollouts(columns := rollout_columns(batch))
    refuse(rollouts.tokens.misfits, _ROWS, annotated=False)
    for name, value in columns.whole.items():
        if name != "meta_info" and column_length(value) is not None:
            values = counted(column_length(value) or 0, "value")
            what = f"it has {values} for {counted(columns.n, 'row')}"
            raise BadRowError(what, f"{_ROWS}: {name}", "give one for each row")
    own = {str(name) for name in columns_of(batch)}
    rows = [named_row(rollouts, i) for i in range(len(rollouts))]
    for name in own & {*ROW}:  # those that a row of `rlskip.open` has by the same name
        for i, row in enumerate(rows):
            row.setdefault(name, rollouts.cell(name, i))
    empty = {name for name in (rows[0] if rows else ()) if all(row[name] is None for row in rows)}
    return [{k: v for k, v in row.items() if k not in empty or k in own} for row in rows]


def named_row(rollouts: Rollouts, i: int) -> Row:
    """A row with the names that ``rlskip.write`` takes: tokens, reward, and the columns' own."""
    made = {name: rollouts.cell(what, i) for what, name in NAMES.items()}
    made["reward"] = rollouts.cell("reward", i)
    for name in rollouts.others:
        column = name if name in rollouts.columns.columns else name.removeprefix("own_")
        if column not in made or made[column] is None:
            made[column] = rollouts.cell(name, i)
    return made


def _make_plain(row: Row, fields: RowFields, where: str) -> None:
    """Make lists of a row's tokens, mask, log-probs and reward, and refuse other values."""
    for what in (*_IDS, *_OF_TOKENS, "reward"):
        name = getattr(fields, what)
        if name is None or (row[name] is None and what not in _IDS):  # a row may have none
            continue
        found = _one_a_token(row[name])
        if what in _IDS and (found is None or (found.size and found.dtype.kind not in "iu")):
            remedy = "give a sequence of integers; texts are `prompt` and `completions`"
            raise BadRowError(f"{name} is not a sequence of token ids", where, remedy)
        if found is None and what in _OF_TOKENS:
            raise BadRowError(f"{name} is not a sequence of numbers", where)
        row[name] = plain(row[name] if found is None else found)
        if found is None and not isinstance(row[name], int | float):  # a reward
            remedy = "give a number, one for each token, or None"
            raise BadRowError(f"{name} is {row[name]!r:.80}, not a number", where, remedy)
    if fields.group in UIDS and ((uid := row[fields.group]) is None or uid != uid):
        what = f"its {fields.group} is {uid}"
        raise BadRowError(what, where, "name its prompt, or leave the field out of all rows")


def _check_lengths(rows: Sequence[Row], fields: RowFields) -> None:
    """Refuse values that are not one a token, by the rule of :mod:`rlskip.batch.padding`."""
    if fields.response is not None or fields.whole is not None:
        misfits = Tokens.of(rollout_columns(columns_of(rows), fields, len(rows))).misfits
        refuse(misfits, _ROWS, annotated=False)
        return
    for name in filter(None, (fields.mask, fields.log_probs, fields.reward)):
        for i, row in enumerate(rows):
            if isinstance(row[name], list):
                remedy = "give completion_ids, too"
                raise BadRowError(f"{name} needs the tokens of a response", f"row {i}", remedy)


def _one_a_token(value: Any) -> np.ndarray | None:
    """A sequence of numbers as an array; None for anything else."""
    return numbers(value) if getattr(value, "ndim", 1) == 1 else None


def _prompt_of(row: Row) -> Any:
    """The prompt: text or messages, else token ids; None without one."""
    return next((row[name] for name in _PROMPTS if row.get(name) is not None), None)


def known_prompt(row: Row) -> Any:
    """The prompt, which must be there."""
    if (prompt := _prompt_of(row)) is None:
        what = f"a row has no prompt, only {', '.join(row)}"
        remedy = f"give all rows one of {', '.join(_PROMPTS)}; or a uid, and rlskip.write(prompts=)"
        raise BadRowError(what, _ROWS, remedy)
    return prompt


def groups_of(rows: Sequence[Row], fields: RowFields, n: int | None) -> tuple[Groups, list[Row]]:
    """The rows of each prompt by its uid, in the order of their first ones, and the prompts' rows.

    There are `n` sessions of each. Of a session of several turns the first one has the prompt.
    """
    groups: Groups = {}
    firsts: dict[str, Row] = {}
    sessions: Counter[str] = Counter()
    uids, are_later = named(row[fields.group or ""] for row in rows), _later_turns(rows, fields)
    for i, (uid, row, is_later) in enumerate(zip(uids, rows, are_later, strict=True)):
        groups.setdefault(uid, []).append(row)
        if is_later:
            continue
        sessions[uid] += 1
        first = firsts.setdefault(uid, row)
        if fingerprint(_prompt_of(row)) != fingerprint(_prompt_of(first)):
            what = f"its {fields.group}, {uid!r:.80}, is that of rows with another prompt"
            raise BadRowError(what, f"row {i}", "give each prompt a uid of its own")
    for uid in groups:
        if n not in (None, sessions[uid]):
            own = counted(sessions[uid], "session")
            what = f"it has {own}, and the directory's name says N{n}"
            raise BadRowError(what, f"group {uid!r:.80}", f"write to N{sessions[uid]} or Nany")
    return groups, [firsts.get(uid, of_uid[0]) for uid, of_uid in groups.items()]


def _later_turns(rows: Sequence[Row], fields: RowFields) -> list[bool]:
    """Which rows are not the first turns of their sessions."""
    turns = [row[fields.turn] if fields.turn else 0 for row in rows]
    least = min((turn for turn in turns if isinstance(turn, int)), default=0)
    return [isinstance(turn, int) and turn > least for turn in turns]


def refuse_other_order(rows: Sequence[Row], digests: Sequence[str], group: str) -> None:
    """Raise BadRowError if prompts with these digests are the rows' own in another order.

    Of rows without one, those of a `group` have one prompt.
    """
    own, owners = digests_of([_prompt_of(row) for row in rows]), dict[str, str]()
    for i, (uid, digest) in enumerate(
        zip(named(row[group] for row in rows), digests, strict=False)
    ):
        if _prompt_of(rows[i]) is None and owners.setdefault(uid, digest) != digest:
            what = f"its {group}, {uid!r:.80}, is that of rows with another prompt"
            raise BadRowError(what, f"row {i}", "give the prompts in the order of the rows")
    if own != [*digests] and Counter(own) == Counter(digests):
        at = next(i for i, (a, b) in enumerate(zip(own, digests, strict=True)) if a != b)
        remedy = "give the prompts in the order of the rows, or both a uid"
        raise BadRowError(f"prompt {at} is that of other rows", _GIVEN, remedy)
