"""Names of things in a trajectory queue: one grammar, one parser.

======================  =================================  ==============================
thing                   key                                parsed
======================  =================================  ==============================
prompt (root)           ``{uid}``                          the whole key
trajectory (row)        ``{uid}_{session_id}_{index}``     from the right, two underscores
session marker          ``{uid}_sess{session_id}``         at the last ``_sess``
======================  =================================  ==============================

A uid may hold underscores, so nothing is ever split from the left. The grammar is verl's
(trainer V1); tags say of which kind a key is, and where they do, the tag decides.

Whoever writes to a queue takes the tags from :func:`prompt_tag`, :func:`row_tag` and
:func:`session_tag`, so that every tag is spelled in one place.
"""

from __future__ import annotations

from typing import Any

import attrs
from attrs.validators import and_, ge, instance_of, lt, min_len

from rlskip.errors import RlskipError

# -- tags: the small dict beside a key ---------------------------------------------------
IS_PROMPT = "is_prompt"
IS_SESSION = "is_session"
SESSION_ID = "session_id"
STATUS = "status"
GLOBAL_STEPS = "global_steps"
# what else counts in steps: the weights a trajectory began and ended with (verl)
STEP_TAGS = (GLOBAL_STEPS, "min_global_steps", "max_global_steps")
N = "n"
EXPECTED_ROLLOUTS = "expected_rollouts"
ATTEMPT = "attempt"
ERROR = "error"
# what skip notes on a prompt: the dump it is to go to, its place in the batch, its content
DUMP_STEP = "dump_step"
DUMP_POSITION = "dump_position"
DUMP_CONTENT = "dump_content"
REPLAYED = "replayed"

# -- per-prompt fields that steer its sessions -------------------------------------------
ROLLOUT_N = "__rollout_n__"
DO_SAMPLE = "__do_sample__"

# -- extra_info of a sampled batch -------------------------------------------------------
ROLLOUT_ROOT_KEYS = "rollout_root_keys"

# -- statuses ----------------------------------------------------------------------------
PENDING = "pending"
RUNNING = "running"
FINISHED = "finished"
SUCCESS = "success"
FAILURE = "failure"

# -- partitions --------------------------------------------------------------------------
TRAIN = "train"
VAL = "val"

_MARKER = "_sess"
_MAX_DIGITS = 18  # fits int64, and is far below the length at which int() refuses a string
_uid = and_(instance_of(str), min_len(1))
_id = and_(instance_of(int), ge(0), lt(10**_MAX_DIGITS))


class KeyFormatError(RlskipError, ValueError):
    """A key that is not of the form its place demands."""


@attrs.frozen(order=True)
class TrajectoryKey:
    """One row: the `index`-th of those that session `session_id` of prompt `uid` wrote."""

    uid: str = attrs.field(validator=_uid)
    session_id: int = attrs.field(validator=_id)
    index: int = attrs.field(validator=_id)

    def __str__(self) -> str:
        return f"{self.uid}_{self.session_id}_{self.index}"

    @classmethod
    def parse(cls, key: str) -> TrajectoryKey:
        """Read ``{uid}_{session_id}_{index}``; raises :class:`KeyFormatError`."""
        parts = split_trajectory(key)
        if parts is not None:
            return cls(*parts)
        raise KeyFormatError(
            f"{key!r} is no trajectory key", remedy="expected {uid}_{session_id}_{index}"
        )


@attrs.frozen(order=True)
class SessionKey:
    """One session's completion marker."""

    uid: str = attrs.field(validator=_uid)
    session_id: int = attrs.field(validator=_id)

    def __str__(self) -> str:
        return f"{self.uid}{_MARKER}{self.session_id}"

    @classmethod
    def parse(cls, key: str) -> SessionKey:
        """Read ``{uid}_sess{session_id}``; raises :class:`KeyFormatError`."""
        parts = split_session(key)
        if parts is not None:
            return cls(*parts)
        raise KeyFormatError(
            f"{key!r} is no session marker", remedy="expected {uid}_sess{session_id}"
        )


def split_trajectory(key: str) -> tuple[str, int, int] | None:
    """`(uid, session_id, index)` of a trajectory key, None for any other key.

    The parser behind :class:`TrajectoryKey`, for those who read keys by the hundred thousand.
    """
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


# -- the tags to write ---------------------------------------------------------------------
def prompt_tag(global_steps: int, n: int) -> dict[str, Any]:
    """The root tag of a prompt whose readiness is counted by its `n` session markers."""
    return {IS_PROMPT: True, GLOBAL_STEPS: global_steps, N: n}


def status_tag(global_steps: int, status: str, expected: int | None = None) -> dict[str, Any]:
    """The root tag of a prompt whose readiness is its own status (verl's own way).

    `expected` sessions, when given, are recorded as ``expected_rollouts``. The status moves
    on with a put of ``{"status": ...}``; it is ``finished`` or ``failure`` in the end.
    """
    tag: dict[str, Any] = {IS_PROMPT: True, GLOBAL_STEPS: global_steps, STATUS: status}
    return tag if expected is None else {**tag, EXPECTED_ROLLOUTS: expected}


def row_tag(global_steps: int, attempt: int = 0, **more: Any) -> dict[str, Any]:
    """The tag of a trajectory that attempt number `attempt` at its session wrote."""
    return {STATUS: SUCCESS, GLOBAL_STEPS: global_steps, ATTEMPT: attempt, **more}


def session_tag(session_id: int, attempt: int = 0, error: str | None = None) -> dict[str, Any]:
    """The tag of a session's marker: a success, or with `error` a failure for that reason.

    Written once per session, after its rows. Rows of any other attempt do not count.
    """
    tag: dict[str, Any] = {IS_SESSION: True, SESSION_ID: session_id, ATTEMPT: attempt}
    return {**tag, STATUS: SUCCESS} if error is None else {**tag, STATUS: FAILURE, ERROR: error}


def dump_tag(step: int, position: int, content: str | None) -> dict[str, Any]:
    """What a prompt's root tag says besides while its group is to be dumped.

    Parameters
    ----------
    step
        The step at which it was submitted; the group belongs to that step's dump.
    position
        Its place in the submitted batch.
    content
        A hash of the prompt; None where it holds nothing but its uid.
    """
    return {DUMP_STEP: step, DUMP_POSITION: position, DUMP_CONTENT: content}


def _number(text: str) -> int | None:
    """Canonical decimal only, so that a parsed key prints back as it was; None otherwise."""
    small = _SMALL.get(text)
    if small is not None or not (text.isascii() and text.isdigit()):
        return small
    return None if text[0] == "0" or len(text) > _MAX_DIGITS else int(text)


# Nearly every id there is: one look-up instead of four checks.
_SMALL = {str(i): i for i in range(1024)}
