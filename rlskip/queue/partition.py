"""The groups of a partition by state, as a call samples them: of a queue, or of a dispatcher.

Changes are filed one by one, and only the groups they touch are judged again. The cost of an
update therefore depends on what changed, not on what the partition holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from rlskip import keys
from rlskip.config.replay import ReplayConfig
from rlskip.queue.protocol import Tag
from rlskip.queue.readiness import PromptGroup, PromptOutcome, State


class Group(Protocol):
    """What is sampled: a prompt's tags in a queue, or its rows in a dispatcher."""

    uid: str
    number: int | None

    @property
    def step(self) -> int | None: ...
    def state(self, viable: int | None) -> State: ...
    def outcome(self) -> PromptOutcome: ...


class Partition:
    """Groups by uid and state, and how old they may be."""

    def __init__(self, name: str, config: ReplayConfig) -> None:
        self.name = name
        self.validates = name == keys.VAL
        # The prompts that refills have submitted, until they are sampled or deleted: for which
        # step, if for one, and how many refills in a row led to each.
        self.refills: dict[str, tuple[int | None, int]] = {}
        self._viable = config.min_viable if config.on_incomplete == "min_viable" else None
        self.strategy = "none" if self.validates else config.max_off_policy_strategy
        self._most_steps = config.max_off_policy_threshold or 0  # which a strategy needs
        self._usual = config.val_n if self.validates else config.n
        self._numbers = itertools.count()
        # Every group has one state, and is in the dict of that one.
        self._states: dict[str, State] = {}
        self._groups: dict[State, dict[str, Any]] = {state: {} for state in State}

    def file(self, group: Group) -> None:
        """Add a group, or note that it has changed."""
        if group.number is None:
            group.number = next(self._numbers)
        self.remove([group.uid])
        state = self._states[group.uid] = group.state(self._viable)
        self._groups[state][group.uid] = group

    def remove(self, uids: Iterable[str]) -> None:
        """Forget these groups."""
        for uid in uids:
            if (state := self._states.pop(uid, None)) is not None:
                del self._groups[state][uid]

    def find(self, uid: str) -> Any:
        """The group of `uid`, or None."""
        return self._groups[self._states[uid]][uid] if uid in self._states else None

    def empty_group(self, uid: str) -> PromptGroup:
        """The group of a prompt that is not there."""
        return PromptGroup(uid, self._usual)

    def groups(
        self, *states: State, step: int | None = None, uids: set[str] | None = None
    ) -> list[Any]:
        """The groups in these states, by step, then in order of appearance.

        Those of one step, or of any; those of `uids`, or all.
        """
        found = [
            group
            for state in states
            for group in self._groups[state].values()
            if (step is None or group.step == step) and (uids is None or group.uid in uids)
        ]
        return sorted(found, key=lambda g: (-math.inf if g.step is None else g.step, g.number))

    def is_stale(self, submitted: int, step: int) -> bool:
        """Whether groups submitted at that step span more steps than the threshold allows."""
        return self.strategy == "drop" and step - submitted + 1 > self._most_steps

    def about_to_be_stale(self, step: int) -> bool:
        """Whether to wait for a running prompt that has reached the threshold."""
        running = self._groups[State.RUNNING].values() if self.strategy == "wait" else ()
        return any(step - group.step + 1 >= self._most_steps for group in running)


class QueuedPartition(Partition):
    """The groups of a queue's partition, by their tags."""

    def apply(self, changes: Mapping[str, Tag | None]) -> None:
        """Apply what a watch reported: each key's current tag, or None for a deleted key."""
        touched: dict[str, PromptGroup] = {}
        for key, tag in changes.items():
            self._read(key, tag, touched)
        for uid, group in touched.items():
            if group.root is None and not (group.rows or group.markers):
                self.remove([uid])
            else:
                self.file(group)

    def _read(self, key: str, tag: Tag | None, touched: dict[str, PromptGroup]) -> None:
        """Give a key to the group that its tag names, or remove it; records touched groups.

        A uid may look like a row or a marker of another uid. Such a key moves when a tag that
        names its kind arrives.
        """
        form = keys.split_trajectory(key) or keys.split_session(key)
        root = touched.get(key) or self.find(key)
        if tag is not None and (tag.get(keys.IS_PROMPT) or (form is None and _names_prompt(tag))):
            root = touched[key] = root or self.empty_group(key)
            before = root.step
            root.root, tag = tag, None
            if root.step != before:  # submitted again, under a uid that was sampled before
                root.sampled, root.varies = False, None
        elif root is not None and root.root is not None:
            root.root, root.sampled = None, False
            touched[key] = root
        if form is None:
            return
        uid, *place = form
        if tag is not None and tag.get(keys.IS_SESSION) and len(place) == 2:
            tag = None  # a marker's tag under a row's name: ignored
        group = touched.get(uid) or self.find(uid)
        if group is None:
            if tag is None:
                return
            group = self.empty_group(uid)
        touched[uid] = group
        tags: dict[Any, Tag] = group.rows if len(place) == 2 else group.markers
        name = tuple(place) if len(place) == 2 else place[0]
        if tag is None:
            tags.pop(name, None)
        else:
            tags[name] = tag


def _names_prompt(tag: Tag) -> bool:
    """Whether a tag without ``is_prompt``, at a key of no known form, belongs to a prompt."""
    statuses = keys.PENDING, keys.RUNNING, keys.FINISHED, keys.FAILURE
    return keys.N in tag or keys.EXPECTED_ROLLOUTS in tag or tag.get(keys.STATUS) in statuses
