"""Names of things in a trajectory queue: one grammar, one parser.

======================  =================================  ==============================
thing                   key                                parsed
======================  =================================  ==============================
prompt (root)           ``{uid}``                          the whole key
trajectory (row)        ``{uid}_{session_id}_{index}``     from the right, two underscores
session marker          ``{uid}_sess{session_id}``         at the last ``_sess``
======================  =================================  ==============================

A uid may hold underscores, so a key is never split from the left. The grammar is verl's
(trainer V1). Where a tag names the kind of its key, the tag decides.

A session that fails may be tried again. The rows of each *attempt* have indices from
``attempt * 10**6``, so a late write of one that was given up meets no row of another. The marker
names the attempt that counts and the number of its rows.
"""

from __future__ import annotations

import operator
from typing import Any

import attrs

from rlskip.errors import RlskipError

# The grammar, and the tags that a writer needs. The rest is for the rooms of rlskip.
__all__ = [
    "KeyFormatError",
    "TrajectoryKey",
    "prompt_tag",
    "row_tag",
    "session_key",
    "session_tag",
    "split_session",
    "split_trajectory",
    "status_tag",
]

# Tags: the small dict stored with a key.
IS_PROMPT = "is_prompt"
STATUS = "status"
GLOBAL_STEPS = "global_steps"
WEIGHT_TAGS = ("min_global_steps", "max_global_steps")  # of its begin and its end: verl's names
STEP_TAGS = (GLOBAL_STEPS, *WEIGHT_TAGS)
N = "n"
EXPECTED_ROLLOUTS = "expected_rollouts"
ATTEMPT = "attempt"
ROWS = "rows"
ERROR = "error"
# What skip records on a prompt: the dump it goes to, its position in the batch, its content.
DUMP_STEP = "dump_step"
DUMP_POSITION = "dump_position"
DUMP_CONTENT = "dump_content"
DUMP_IDENTITY = "dump_identity"
REPLAYED = "replayed"
# What dispatch records on a prompt: how its step's journal names it.
JOURNAL_NAME = "journal_name"

# Fields of a prompt that steer its sessions; an entry of a sampled batch's extra_info.
ROLLOUT_N = "__rollout_n__"
DO_SAMPLE = "__do_sample__"
ROLLOUT_ROOT_KEYS = "rollout_root_keys"

# Statuses, and partitions.
RUNNING = "running"
FINISHED = "finished"
SUCCESS = "success"
FAILURE = "failure"
TRAIN = "train"
VAL = "val"

ROWS_PER_ATTEMPT = 10**6
_MARKER = "_sess"
_MAX_DIGITS = 18  # fits int64, and is far below the length at which int() refuses a string


class KeyFormatError(RlskipError, ValueError):
    """A key that does not have the required form."""


@attrs.frozen(order=True)
class TrajectoryKey:
    """One row: number `index` of those that session `session_id` of prompt `uid` wrote."""

    uid: str
    session_id: int
    index: int

    def __str__(self) -> str:
        return trajectory_key(self.uid, self.session_id, self.index)

    @classmethod
    def of_attempt(cls, uid: str, session_id: int, index: int, attempt: int) -> TrajectoryKey:
        """The key of row `index` of one attempt at a session; no two attempts share a key."""
        key = cls(uid, session_id, attempt * ROWS_PER_ATTEMPT + index)
        if not 0 <= index < ROWS_PER_ATTEMPT or split_trajectory(str(key)) != attrs.astuple(key):
            raise KeyFormatError(
                f"row {index!r} of attempt {attempt!r} at session {session_id!r} of {uid!r}",
                remedy=f"number sessions from 0, and rows from 0 to {ROWS_PER_ATTEMPT - 1}",
            )
        return key

    @classmethod
    def parse(cls, key: str) -> TrajectoryKey:
        """Read ``{uid}_{session_id}_{index}``; raises :class:`KeyFormatError`."""
        if (parts := split_trajectory(key)) is None:
            raise KeyFormatError(f"expected {{uid}}_{{session_id}}_{{index}}, got {key!r}")
        return cls(*parts)


def trajectory_key(uid: str, session_id: int, index: int) -> str:
    """The key of a row: ``{uid}_{session_id}_{index}``."""
    return f"{uid}_{session_id}_{index}"


def session_key(uid: str, session_id: int) -> str:
    """The key of a session's marker: ``{uid}_sess{session_id}``."""
    return f"{uid}{_MARKER}{session_id}"


def split_trajectory(key: str) -> tuple[str, int, int] | None:
    """`(uid, session_id, index)` of a trajectory key, None for any other key."""
    parts = key.rsplit("_", 2)
    if len(parts) < 3 or not parts[0]:
        return None
    session_id, index = _number(parts[1]), _number(parts[2])
    return None if session_id is None or index is None else (parts[0], session_id, index)


def split_session(key: str) -> tuple[str, int] | None:
    """`(uid, session_id)` of a session marker, None for any other key."""
    uid, _, number = key.rpartition(_MARKER)
    session_id = _number(number) if uid else None
    return None if session_id is None else (uid, session_id)


def uid_of(key: str) -> str | None:
    """The uid in the key of a row or a marker; None for any other key."""
    form = split_trajectory(key) or split_session(key)
    return None if form is None else form[0]


# -- the tags to write -----------------------------------------------------------------------
def prompt_tag(step: int, n: int) -> dict[str, Any]:
    """The root tag of a prompt that is finished once `n` sessions have a marker."""
    return {IS_PROMPT: True, GLOBAL_STEPS: step, N: n}


def status_tag(step: int, status: str, expected: int | None = None) -> dict[str, Any]:
    """The root tag of a prompt that is finished by its own status (verl's way).

    A later put of ``{"status": ...}`` changes the status; the last one is ``finished`` or
    ``failure``. `expected` is the number of its sessions.
    """
    tag: dict[str, Any] = {IS_PROMPT: True, GLOBAL_STEPS: step, STATUS: status}
    return tag if expected is None else {**tag, EXPECTED_ROLLOUTS: expected}


def row_tag(step: int, attempt: int = 0, **more: Any) -> dict[str, Any]:
    """The tag of a row that attempt number `attempt` at its session wrote."""
    return {STATUS: SUCCESS, GLOBAL_STEPS: step, ATTEMPT: attempt, **more}


def session_tag(
    session_id: int, attempt: int = 0, error: str | None = None, rows: int | None = None
) -> dict[str, Any]:
    """The tag of a session's marker, written once per session and after its rows.

    Only rows of `attempt` count. A session has failed that has an `error`, or not as many `rows`;
    None: their number is not known.
    """
    ended = {STATUS: SUCCESS} if error is None else {STATUS: FAILURE, ERROR: error}
    counted = {} if rows is None else {ROWS: rows}
    return {"is_session": True, "session_id": session_id, ATTEMPT: attempt, **counted, **ended}


def dump_tag(step: int, position: int, content: str | None, identity: str) -> dict[str, Any]:
    """What skip adds to the root tag of a prompt; `content` is None if nothing tells it apart."""
    where = {DUMP_STEP: step, DUMP_POSITION: position}
    return {**where, DUMP_CONTENT: content, DUMP_IDENTITY: identity}


def integer(value: Any) -> int | None:
    """A tag's value as an int, numpy integers included; None for anything else, a bool too."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _number(text: str) -> int | None:
    """The number in canonical decimal, so that a parsed key prints unchanged; None otherwise."""
    if text in _SMALL:
        return _SMALL[text]
    is_plain = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    return int(text) if is_plain and text[0] != "0" else None


# Nearly every id in use: one look-up instead of four checks.
_SMALL = {str(i): i for i in range(1024)}
