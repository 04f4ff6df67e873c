"""When is a prompt's group over, and is it whole? Pure functions of its tags.

Two models, and the root tag says which one a prompt uses:

session counting
    The tag holds ``n``. Over when `n` sessions have a marker, success or failure. A session
    succeeded when its marker says so and it wrote a row.
prompt status
    The tag holds no ``n``. Over when its ``status`` is ``finished`` or ``failure``. A session
    succeeded when it wrote a row, and no marker says that it failed.

Rows of an earlier attempt at a session do not count, nor do rows whose status is not success.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from enum import Enum
from typing import Any

import attrs

from rlskip.keys import (
    ATTEMPT,
    ERROR,
    EXPECTED_ROLLOUTS,
    FAILURE,
    FINISHED,
    GLOBAL_STEPS,
    STATUS,
    SUCCESS,
    N,
    SessionKey,
)
from rlskip.queue import Tag


class State(Enum):
    """Where a group stands."""

    LOOSE = "no prompt with a step yet: rows or markers came first, or a bare tag"
    RUNNING = "sessions are under way"
    WHOLE = "over, and fit to be sampled"
    BROKEN = "over, and incomplete"
    TAKEN = "sampled, and not cleaned up yet"


@attrs.define(eq=False)
class Group:
    """All that a queue's tags say of one prompt."""

    uid: str
    number: int  # counts groups in the order in which they appeared
    root: Tag | None = None
    rows: dict[tuple[int, int], Tag] = attrs.field(factory=dict)  # by session id and index
    markers: dict[int, Tag] = attrs.field(factory=dict)  # by session id
    taken: bool = False
    place: tuple[State, int | None] | None = None  # on which shelf of the index

    @property
    def step(self) -> int | None:
        """The step the prompt was submitted at; None without a usable one."""
        return None if self.root is None else _integer(self.root.get(GLOBAL_STEPS))

    @property
    def counted(self) -> bool:
        """Whether session markers make this prompt ready, and not its status."""
        return self.root is not None and N in self.root

    @property
    def empty(self) -> bool:
        return self.root is None and not self.rows and not self.markers

    def keys(self) -> list[str]:
        """Every key of the group: root, rows and session markers."""
        keys = [] if self.root is None else [self.uid]
        keys += [self._key(*place) for place in self.rows]
        return keys + [str(SessionKey(self.uid, session_id)) for session_id in self.markers]

    def expected(self, otherwise: int | None) -> int | None:
        """How many sessions the root tag records, else `otherwise`; None when nobody knows."""
        root = self.root or {}
        return _positive(root.get(EXPECTED_ROLLOUTS)) or _positive(root.get(N)) or otherwise

    def over(self) -> bool:
        """No session of this prompt is under way any more."""
        if self.root is None:
            return False
        if not self.counted:
            return self.root.get(STATUS) in (FINISHED, FAILURE)
        n = _positive(self.root.get(N))
        if n is None or len(self.markers) < n:
            return False
        return sum(tag.get(STATUS) in (SUCCESS, FAILURE) for tag in self.markers.values()) >= n

    def tally(self) -> tuple[dict[int, dict[int, Tag]], dict[int, str]]:
        """The rows of each session that succeeded, and why each that failed did; by session id."""
        sessions: dict[int, dict[int, Tag]] = {session_id: {} for session_id in self.markers}
        for (session_id, index), tag in self.rows.items():
            sessions.setdefault(session_id, {})[index] = tag
        counted = self.counted
        succeeded: dict[int, dict[int, Tag]] = {}
        failed: dict[int, str] = {}
        for session_id in sorted(sessions):
            marker = self.markers.get(session_id, {})
            rows = _of_last_attempt(sessions[session_id], marker)
            ended = marker.get(STATUS)
            said = [tag.get(STATUS) for tag in rows.values()]
            if ended == FAILURE:
                failed[session_id] = str(marker.get(ERROR, ""))
            elif FAILURE in said:
                at_fault = [*rows.values()][said.index(FAILURE)]
                failed[session_id] = str(at_fault.get(ERROR, ""))
            elif rows and said.count(SUCCESS) == len(said) and (ended == SUCCESS or not counted):
                succeeded[session_id] = rows
        return succeeded, failed

    def successful_rows(self) -> Iterator[tuple[str, Tag]]:
        """What a batch takes of this group: its successful sessions' rows, by session and index."""
        for session_id, rows in self.tally()[0].items():
            for index in sorted(rows):
                yield self._key(session_id, index), rows[index]

    def _key(self, session_id: int, index: int) -> str:
        # As TrajectoryKey prints it, which would check a million ids again that come from keys.
        return f"{self.uid}_{session_id}_{index}"


def _of_last_attempt(rows: dict[int, Tag], marker: Tag) -> dict[int, Tag]:
    """A session's rows that count: of the attempt its marker names, else of the latest."""
    attempts = [_integer(tag.get(ATTEMPT)) or 0 for tag in rows.values()]
    last = _integer(marker.get(ATTEMPT))
    if last is None:
        last = max(attempts, default=0)
    if attempts.count(last) == len(attempts):
        return rows
    return {index: rows[index] for index, of in zip(rows, attempts, strict=True) if of == last}


@attrs.frozen
class PromptOutcome:
    """What became of one prompt, as errors, callbacks and log lines tell it.

    Attributes
    ----------
    uid, global_steps
        The prompt, and the step at which it was submitted.
    status
        The status of its root tag; None where session markers are counted.
    expected
        Sessions expected; None when neither its tag nor the config says.
    succeeded
        Ids of the distinct sessions that succeeded.
    failed
        ``(session id, reason)`` of those that say they failed; the reason may be empty.
    """

    uid: str
    global_steps: int | None
    status: str | None
    expected: int | None
    succeeded: tuple[int, ...]
    failed: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, group: Group, otherwise: int | None) -> PromptOutcome:
        """The outcome so far; `otherwise` is expected where the tag does not say."""
        succeeded, failed = group.tally()
        status = None if group.root is None or group.counted else group.root.get(STATUS)
        return cls(
            group.uid,
            group.step,
            None if status is None else str(status),
            group.expected(otherwise),
            tuple(succeeded),
            tuple(failed.items()),
        )

    @property
    def actual(self) -> int:
        """How many distinct sessions succeeded."""
        return len(self.succeeded)

    @property
    def missing(self) -> tuple[int, ...]:
        """The sessions of which nothing was heard, as many as are short of `expected`."""
        heard = {*self.succeeded, *dict(self.failed)}
        silent = (i for i in range(self.expected or 0) if i not in heard)
        return tuple(itertools.islice(silent, max(0, (self.expected or 0) - len(heard))))

    @property
    def complete(self) -> bool:
        """Nothing failed, and no session is missing; with no expectation, at least one is there."""
        return self.status != FAILURE and not self.failed and self.actual >= (self.expected or 1)

    def __str__(self) -> str:
        expected = "some" if self.expected is None else self.expected
        causes = [f"session {i} failed{f': {why}' if why else ''}" for i, why in self.failed]
        if self.missing:
            plural = "s" if len(self.missing) > 1 else ""
            causes.append(f"session{plural} {', '.join(map(str, self.missing))} missing")
        if self.status is not None:
            causes.append(f"status {self.status}")
        said = f" ({'; '.join(causes)})" if causes else ""
        return f"{self.uid}: expected {expected}, got {self.actual}{said}"


def state_of(group: Group, otherwise: int | None, min_viable: int | None) -> State:
    """Where `group` stands.

    Parameters
    ----------
    group
        A prompt's tags as they are now.
    otherwise
        Sessions to expect where the root tag does not say; None when nobody knows.
    min_viable
        So many successful sessions are enough, or all that are expected where that is fewer;
        None when the group must be complete.
    """
    if group.taken:
        return State.TAKEN
    if group.step is None:
        return State.LOOSE
    if not group.over():
        return State.RUNNING
    outcome = PromptOutcome.of(group, otherwise)
    enough = min_viable is not None and outcome.actual >= min(
        min_viable, outcome.expected or min_viable
    )
    return State.WHOLE if enough or outcome.complete else State.BROKEN


def _integer(value: Any) -> int | None:
    """A tag's value as an int, numpy's included; None for anything else."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _positive(value: Any) -> int | None:
    number = _integer(value)
    return number if number is not None and number > 0 else None
