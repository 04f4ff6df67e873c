"""Whether a prompt's group is finished, and whether it is complete: pure functions of its tags.

There are two models; the root tag shows which one a prompt uses:

session counting
    The tag holds ``n``. The group is finished when `n` sessions have a marker, success or failure.
    A session succeeded if its marker says so and it wrote a row.
prompt status
    The tag holds no ``n``. The group is finished when its ``status`` is ``finished`` or
    ``failure``. A session succeeded if it wrote a row and no marker says that it failed.

Only rows of the attempt that counts count, and only those whose status is success.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from enum import Enum
from typing import Any

import attrs

from rlskip import keys
from rlskip.errors import RlskipError
from rlskip.queue.protocol import Tag

_MOST_SESSIONS = 10**6  # of a prompt; a root tag that says more is invalid
_NAMED = 20  # prompts in a message; the attribute `prompts` of its error holds all of them


class State(Enum):
    """The state of a group."""

    ORPHANED = "rows, markers or a bare tag, but no prompt with a step"
    RUNNING = "some sessions have not finished"
    COMPLETE = "finished, and can be sampled"
    INCOMPLETE = "finished, and must not be sampled"
    SAMPLED = "sampled, and not deleted yet"


Place = tuple[Any, ...]
"""Where in a group a tag is: () the root's, (session,) a marker's, (session, index) a row's."""


@attrs.define(eq=False)
class PromptGroup:
    """One prompt's tags, by place."""

    # `sampled` and `varies` are of the present root: a prompt that is submitted again, at another
    # step, may be sampled again.
    uid: str
    usual: int | None = None  # the sessions of a prompt whose root tag has no number of them
    tags: dict[Place, Tag] = attrs.field(factory=dict)
    told: bool = False  # on_evict was called for it, and a refill that failed brought it back
    sampled: bool = False
    varies: bool | None = None  # whether a filter lets it pass; None: not judged yet
    metric: float = 0.0  # of its first row, for such a filter

    @property
    def root(self) -> Tag:
        return self.tags.get((), {})

    @property
    def step(self) -> int | None:
        """The step at which the prompt was submitted; None if there is no valid one."""
        return keys.integer(self.root.get(keys.GLOBAL_STEPS))

    def set(self, place: Place, tag: Tag | None) -> None:
        """Set a tag; None removes it."""
        step = None if place else self.step
        if tag is None:
            self.tags.pop(place, None)
        else:
            self.tags[place] = tag
        if not place and self.step != step:  # submitted again, or deleted
            self.sampled, self.varies = False, None

    def by_key(self) -> dict[str, Tag]:
        """Every key that the queue holds of it, with its tag."""
        named: list[Any] = [str, keys.session_key, keys.trajectory_key]
        return {named[len(place)](self.uid, *place): tag for place, tag in self.tags.items()}

    def rows(self, *, failed: bool = False) -> list[tuple[str, Tag]]:
        """The rows of the sessions that succeeded, or all, by session and index."""
        if failed:
            places = sorted(place for place in self.tags if len(place) == 2)
        else:
            places = [place for rows in self._tally()[0].values() for place in rows]
        return [(keys.trajectory_key(self.uid, *place), self.tags[place]) for place in places]

    def state(self, viable: int | None) -> State:
        """The state that the tags show; `viable` is that of :meth:`PromptOutcome.accepted`."""
        if self.sampled:
            return State.SAMPLED
        if self.step is None:
            return State.ORPHANED
        if keys.N not in self.root:
            finished = self.root.get(keys.STATUS) in (keys.FINISHED, keys.FAILURE)
        else:
            markers = [tag.get(keys.STATUS) for place, tag in self.tags.items() if len(place) == 1]
            ended = sum(status in (keys.SUCCESS, keys.FAILURE) for status in markers)
            finished = ended >= (_positive(self.root[keys.N]) or math.inf)
        if not finished:
            return State.RUNNING
        return State.COMPLETE if self.outcome().accepted(viable) else State.INCOMPLETE

    def outcome(self) -> PromptOutcome:
        """The outcome so far."""
        root, expected = self.root, self.usual
        status = None if keys.N in root or keys.STATUS not in root else str(root[keys.STATUS])
        for name in (keys.N, keys.EXPECTED_ROLLOUTS):  # the second one takes precedence
            if (number := root.get(name)) is not None and expected != 0:
                expected = _positive(number) or 0
                if not expected:  # it does not say how many to expect: nothing is complete
                    status = f"invalid: {name}={number!r:.40}"
        succeeded, failed = self._tally()
        ended = tuple(succeeded), tuple(failed.items())
        return PromptOutcome(self.uid, self.step, status, expected, *ended)

    def _tally(self) -> tuple[dict[int, list[Place]], dict[int, str]]:
        """By session id: the rows of each session that succeeded, and why each other failed."""
        sessions: dict[int, list[Place]] = {}
        for place in sorted(self.tags):
            if place:
                rows = sessions.setdefault(place[0], [])
                if len(place) == 2:
                    rows.append(place)
        succeeded: dict[int, list[Place]] = {}
        failed: dict[int, str] = {}
        for session_id, rows in sessions.items():
            marker = self.tags.get((session_id,), {})
            attempt = keys.integer(marker.get(keys.ATTEMPT)) or 0
            rows = [place for place in rows if place[1] // keys.ROWS_PER_ATTEMPT == attempt]
            statuses = {self.tags[place].get(keys.STATUS) for place in rows}
            ended, announced = marker.get(keys.STATUS), keys.integer(marker.get(keys.ROWS))
            if ended == keys.FAILURE:
                failed[session_id] = str(marker.get(keys.ERROR, ""))
            elif announced not in (None, len(rows)):
                failed[session_id] = f"found {len(rows)} of its {announced} rows"
            elif statuses == {keys.SUCCESS} and (ended == keys.SUCCESS or keys.N not in self.root):
                succeeded[session_id] = rows
        return succeeded, failed


@attrs.frozen
class PromptOutcome:
    """The outcome of one prompt, for errors, callbacks and log lines.

    `status` is that of its root tag, or None with session counting. `expected` sessions are those
    of its tag, else of the config: None if neither has a number, 0 if that of its tag is invalid.
    `succeeded` has the ids of distinct sessions, `failed` ids with a reason, which may be empty.
    """

    uid: str
    step: int | None
    status: str | None
    expected: int | None
    succeeded: tuple[int, ...]
    failed: tuple[tuple[int, str], ...]

    @property
    def actual(self) -> int:
        """How many distinct sessions succeeded."""
        return len(self.succeeded)

    @property
    def missing(self) -> tuple[int, ...]:
        """Sessions with no outcome yet, as many as are missing from `expected`."""
        known = {*self.succeeded, *dict(self.failed)}
        unknown = (i for i in range(self.expected or 0) if i not in known)
        return tuple(itertools.islice(unknown, max(0, (self.expected or 0) - len(known))))

    @property
    def complete(self) -> bool:
        """No session failed, is missing or too many; without an expected number, one is enough."""
        if self.status == keys.FAILURE or self.failed:
            return False
        return self.actual >= 1 and self.expected in (None, self.actual)

    def accepted(self, viable: int | None) -> bool:
        """Whether it is complete, or has `viable` sessions, or as many of those as are expected."""
        if self.complete or viable is None:
            return self.complete
        if self.expected is None:
            return viable <= self.actual
        # Sessions above the expected number are never trained on: its root was changed.
        return 0 < min(viable, self.expected) <= self.actual <= self.expected

    def __str__(self) -> str:
        expected = "some" if self.expected is None else self.expected
        causes = [f"session {i} failed{f': {why}' if why else ''}" for i, why in self.failed]
        if self.missing:
            plural = "s" if len(self.missing) > 1 else ""
            causes.append(f"session{plural} {', '.join(map(str, self.missing))} missing")
        if self.status is not None:
            causes.append(f"status {self.status}")
        why = f" ({'; '.join(causes)})" if causes else ""
        return f"{self.uid}: expected {expected}, got {self.actual}{why}"


def _positive(value: Any) -> int | None:
    number = keys.integer(value)
    return number if number is not None and 0 < number <= _MOST_SESSIONS else None


class IncompleteRolloutError(RlskipError, RuntimeError):
    """Finished groups are incomplete, and ``replay.on_incomplete`` does not accept them.

    `prompts` has a :class:`PromptOutcome` for each prompt concerned, of this `partition` and the
    call's `step`.
    """

    partition: str = ""
    step: int | None = None
    prompts: tuple[PromptOutcome, ...] = ()


class ReplayTimeoutError(IncompleteRolloutError, TimeoutError):
    """``replay.timeout_s`` has passed; `prompts` are those with missing sessions."""


def name_prompts(prompts: Sequence[PromptOutcome]) -> str:
    """One indented line per prompt, for the first twenty."""
    lines = [f"\n  {prompt}" for prompt in prompts[:_NAMED]]
    if len(prompts) > _NAMED:
        lines.append(f"\n  and {len(prompts) - _NAMED} more")
    return "".join(lines)
