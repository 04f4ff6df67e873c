"""The groups of a partition: which are finished, and which of those are complete.

There are two models; the root tag shows which one a prompt uses:

session counting
    The tag holds ``n``. The group is finished when `n` sessions have a marker, success or failure.
    A session succeeded if its marker says so and it wrote a row.
prompt status
    The tag holds no ``n``. The group is finished when its ``status`` is ``finished`` or
    ``failure``. A session succeeded if it wrote a row and no marker says that it failed.

Only rows of the attempt that counts count, and only those whose status is success. The cost of an
update depends on what changed, not on what the partition holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import attrs

from rlskip import keys
from rlskip._human import counted
from rlskip.config.other_nodes import ReplayConfig
from rlskip.errors import RlskipError
from rlskip.queue.protocol import Tag

_MOST_SESSIONS = 10**6  # of a prompt; a root tag that says more is invalid


class State(Enum):
    """The state of a group that is not sampled yet."""

    RUNNING = "some sessions have not finished"
    COMPLETE = "finished, and can be sampled"
    INCOMPLETE = "finished, and must not be sampled"


Place = tuple[Any, ...]  # of a tag: () the root's, (session,) a marker's, (session, index) a row's


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
        expected, known = self.expected or 0, {*self.succeeded, *dict(self.failed)}
        unknown = (i for i in range(expected) if i not in known)
        return tuple(itertools.islice(unknown, max(0, expected - len(known))))

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


@attrs.define(eq=False)
class PromptGroup:
    """One prompt's keys and their tags, by place."""

    uid: str
    usual: int | None = None  # the sessions of a prompt whose root tag has no number of them
    entries: dict[Place, tuple[str, Tag]] = attrs.field(factory=dict)
    # These are of the present root: submitted again, at another step, it may be sampled again.
    sampled: bool = False
    varies: bool | None = None  # whether a filter lets it pass; None: not judged yet
    told: bool = False  # `on_evict` has been called with it
    _tallied: Any = attrs.field(default=None, init=False)  # of the present tags

    def tag(self, *place: int) -> Tag:
        """The tag at a place; empty without one."""
        return self.entries[place][1] if place in self.entries else {}

    @property
    def step(self) -> int | None:
        """The step at which the prompt was submitted; None if there is no valid one."""
        return keys.integer(self.tag().get(keys.GLOBAL_STEPS))

    def set(self, place: Place, key: str, tag: Tag | None) -> None:
        """Set the tag of a key; None removes it."""
        step = None if place else self.step  # for few of a million keys
        self._tallied = None
        if tag is None:
            self.entries.pop(place, None)
        else:
            self.entries[place] = key, tag
        if not place and self.step != step:
            self.sampled, self.varies, self.told = False, None, False

    def rows(self, *, failed: bool = False) -> list[tuple[str, Tag]]:
        """The rows of the sessions that succeeded, or all, by session and index."""
        if failed:
            places = sorted(place for place in self.entries if len(place) == 2)
        else:
            places = [place for rows in self._tally()[0].values() for place in rows]
        return [self.entries[place] for place in places]

    @property
    def running(self) -> bool | None:
        """Whether it has not finished, by its tags.

        None of one that was sampled, and of rows, markers or a bare tag without a prompt.
        """
        root = self.tag()
        if self.sampled or self.step is None:
            return None
        if keys.N not in root:
            return root.get(keys.STATUS) not in (keys.FINISHED, keys.FAILURE)
        markers = (tag for place, (_, tag) in self.entries.items() if len(place) == 1)
        ended = sum(tag.get(keys.STATUS) in (keys.SUCCESS, keys.FAILURE) for tag in markers)
        return ended < (_positive(root[keys.N]) or math.inf)

    def outcome(self) -> PromptOutcome:
        """The outcome so far."""
        root = self.tag()
        status = None if keys.N in root or keys.STATUS not in root else str(root[keys.STATUS])
        number = root.get(keys.EXPECTED_ROLLOUTS, root.get(keys.N))
        # Of 0, as of what is not a number of sessions, nothing is complete.
        expected = self.usual if number is None else _positive(number) or 0
        succeeded, failed = self._tally()
        if (n := _positive(root.get(keys.N))) and n < len(succeeded):  # the root was changed
            expected = n
        ended = tuple(succeeded), tuple(failed.items())
        return PromptOutcome(self.uid, self.step, status, expected, *ended)

    def _tally(self) -> tuple[dict[int, list[Place]], dict[int, str]]:
        """By session id: the rows of each session that succeeded, and why each other failed."""
        if self._tallied is not None:  # a call that samples asks three times
            return self._tallied  # type: ignore[no-any-return]
        sessions: dict[int, list[Place]] = {}
        for place in sorted(filter(None, self.entries)):
            sessions.setdefault(place[0], []).extend([place] if len(place) == 2 else [])
        succeeded: dict[int, list[Place]] = {}
        failed: dict[int, str] = {}
        for session_id, rows in sessions.items():
            marker = self.tag(session_id)
            attempt = keys.integer(marker.get(keys.ATTEMPT)) or 0
            rows = [place for place in rows if place[1] // keys.ROWS_PER_ATTEMPT == attempt]
            statuses = {self.entries[place][1].get(keys.STATUS) for place in rows}
            ended, announced = marker.get(keys.STATUS), keys.integer(marker.get(keys.ROWS))
            if ended == keys.FAILURE:
                failed[session_id] = str(marker.get(keys.ERROR, ""))
            elif announced not in (None, len(rows)):
                failed[session_id] = f"found {len(rows)} of its {counted(announced, 'row')}"
            elif statuses == {keys.SUCCESS} and (ended == keys.SUCCESS or keys.N not in self.tag()):
                succeeded[session_id] = rows
        self._tallied = succeeded, failed
        return succeeded, failed


def _positive(value: Any) -> int | None:
    number = keys.integer(value)
    return number if number is not None and 0 < number <= _MOST_SESSIONS else None


class Partition:
    """Groups by uid and state, of a queue or of a dispatcher, as a call samples them.

    A group is a :class:`PromptGroup`, or a dispatcher's: it has a `uid`, a `step`, an
    ``outcome()``, and is ``running`` or not.
    """

    def __init__(self, name: str, config: ReplayConfig) -> None:
        self.name, self.config = name, config
        self.validates = name == keys.VAL
        self._usual = config.val_n if self.validates else config.n
        self._viable = config.min_viable if config.on_incomplete == "min_viable" else None
        self._groups: dict[str, tuple[State | None, Any]] = {}  # in order of appearance

    def file(self, group: Any) -> None:
        """Add a group, or note that it has changed."""
        state = State.RUNNING if (running := group.running) else None
        if running is False:
            accepted = group.outcome().accepted(self._viable)
            state = State.COMPLETE if accepted else State.INCOMPLETE
        self._groups[group.uid] = state, group

    def remove(self, uids: Iterable[str]) -> None:
        """Forget these groups."""
        for uid in uids:
            self._groups.pop(uid, None)

    def find(self, uid: str) -> Any:
        """The group of `uid`, or None."""
        return self._groups[uid][1] if uid in self._groups else None

    def groups(self, *states: State, step: int | None = None) -> list[Any]:
        """The groups in these states, of one step or of any: by step, then as they appeared."""
        found = [
            group
            for state, group in self._groups.values()
            if state in states and (step is None or group.step == step)
        ]
        return sorted(found, key=lambda group: -math.inf if group.step is None else group.step)

    def apply(self, changes: Mapping[str, Tag | None]) -> None:
        """Apply what a watch reported: a key's current tag, or None for a deleted key."""
        touched: dict[str, PromptGroup] = {}
        for key, tag in changes.items():
            form = keys.split_trajectory(key) or keys.split_session(key)
            # A uid may look like a row or a marker of another uid. Such a key moves when a tag
            # that names its kind arrives.
            is_root = tag is not None and (tag.get(keys.IS_PROMPT) or form is None)
            places: list[tuple[str, Place, Tag | None]] = []
            if is_root or key in touched or key in self._groups:
                places.append((key, (), tag if is_root else None))
            if form is not None:
                places.append((form[0], form[1:], None if is_root else tag))
            for uid, place, its in places:
                group = touched.get(uid) or self.find(uid)
                if group is not None or its is not None:
                    touched[uid] = group = group or PromptGroup(uid, self._usual)
                    group.set(place, key, its)
        for uid, group in touched.items():
            if group.entries:
                self.file(group)
            else:
                self.remove([uid])
