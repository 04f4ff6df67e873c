"""A partition's keys, collected into groups and shelved by the state of each group.

Changes are filed one by one, and only the groups they touch are judged again. The cost of an
update therefore depends on what changed, not on what the partition holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from operator import attrgetter

from rlskip.keys import (
    EXPECTED_ROLLOUTS,
    FAILURE,
    FINISHED,
    IS_PROMPT,
    IS_SESSION,
    PENDING,
    RUNNING,
    STATUS,
    N,
    split_session,
    split_trajectory,
)
from rlskip.queue import Tag
from rlskip.replay.readiness import PromptGroup, State

_PROMPT_STATUSES = (PENDING, RUNNING, FINISHED, FAILURE)


class PartitionIndex:
    """The groups of one partition.

    Parameters
    ----------
    judge
        Returns the state of a group; called whenever one of the group's keys changed.
    drops_late_writes
        As the queue's attribute of this name.
    """

    def __init__(self, judge: Callable[[PromptGroup], State], drops_late_writes: bool) -> None:
        self._judge = judge
        self._drops_late_writes = drops_late_writes
        self._groups: dict[str, PromptGroup] = {}
        self._next_number = 0
        # state -> step -> uid -> group
        self._shelves: dict[State, dict[int | None, dict[str, PromptGroup]]] = defaultdict(dict)

    def apply(self, changes: Mapping[str, Tag | None]) -> None:
        """Apply what a watch reported: each key's current tag, or None for a deleted key."""
        touched: dict[str, PromptGroup] = {}
        for key, tag in changes.items():
            self._file(key, tag, touched)
        for group in touched.values():
            self._shelve(group)

    def groups(self, state: State, step: int | None = None) -> Iterator[PromptGroup]:
        """The groups in `state`, of one step or of all; by step, then in order of appearance."""
        shelves = self._shelves[state]
        for at in sorted(shelves, key=_by_step) if step is None else [step]:
            yield from sorted(shelves.get(at, {}).values(), key=attrgetter("number"))

    def steps(self, state: State) -> dict[int | None, int]:
        """The number of groups in `state`, by step."""
        return {step: len(shelf) for step, shelf in self._shelves[state].items()}

    def has_prompt(self, uid: str) -> bool:
        """Whether there is a prompt `uid` with a step."""
        group = self._groups.get(uid)
        return group is not None and group.step is not None

    def find(self, uid: str) -> PromptGroup:
        """The group of `uid`; an empty one if the partition has no keys of it."""
        return self._groups.get(uid) or PromptGroup(uid, 0, self._drops_late_writes)

    def mark_sampled(self, groups: Iterable[PromptGroup]) -> None:
        """Mark groups as sampled: they stay in the index and are never sampled again."""
        for group in groups:
            group.sampled = True
            self._shelve(group)

    def remove(self, uids: Iterable[str]) -> list[str]:
        """Remove these prompts with their rows and markers; returns all their keys."""
        keys: list[str] = []
        for uid in uids:
            group = self._groups.pop(uid, None)
            if group is not None:
                keys += group.keys()
                self._unshelve(group)
        return keys

    def _file(self, key: str, tag: Tag | None, touched: dict[str, PromptGroup]) -> None:
        """File a key under the group that its tag names, or remove it; records touched groups.

        A uid may look like a row or a marker of another uid. Such a key moves when a tag that
        names its kind arrives.
        """
        form = split_trajectory(key) or split_session(key)
        root = self._groups.get(key)
        if tag is not None and (tag.get(IS_PROMPT) or (form is None and _names_prompt(tag))):
            root = root or self._group(key)
            before = root.step
            root.root, tag = tag, None
            if root.step != before:  # submitted again, under a uid that was sampled before
                root.sampled, root.varies = False, None
            touched[key] = root
        elif root is not None and root.root is not None:
            root.root, root.sampled = None, False
            touched[key] = root
        if form is None:
            return
        if tag is not None and tag.get(IS_SESSION) and len(form) == 3:
            tag = None  # a marker's tag under a row's name: ignored
        uid = form[0]
        group = self._groups.get(uid) or (None if tag is None else self._group(uid))
        if group is None:
            return
        touched[uid] = group
        if len(form) == 3:
            _set(group.rows, form[1:], tag)
        else:
            _set(group.markers, form[1], tag)

    def _group(self, uid: str) -> PromptGroup:
        """The group of `uid`, created if it does not exist."""
        group = self._groups.get(uid)
        if group is None:
            group = PromptGroup(uid, self._next_number, self._drops_late_writes)
            self._groups[uid] = group
            self._next_number += 1
        return group

    def _shelve(self, group: PromptGroup) -> None:
        """Move a group to the shelf of its current state; an empty group is removed."""
        if group.empty:
            self._groups.pop(group.uid, None)
            self._unshelve(group)
            return
        place = (self._judge(group), group.step)
        if group.place != place:
            self._unshelve(group)
            group.place = place
            self._shelves[place[0]].setdefault(place[1], {})[group.uid] = group

    def _unshelve(self, group: PromptGroup) -> None:
        if group.place is not None:
            state, step = group.place
            group.place = None
            del self._shelves[state][step][group.uid]
            if not self._shelves[state][step]:
                del self._shelves[state][step]


def _set(tags: dict, name: Hashable, tag: Tag | None) -> None:
    """Set a tag, or remove it."""
    if tag is None:
        tags.pop(name, None)
    else:
        tags[name] = tag


def _names_prompt(tag: Tag) -> bool:
    """Whether a tag without ``is_prompt``, at a key of no known form, belongs to a prompt."""
    return N in tag or EXPECTED_ROLLOUTS in tag or tag.get(STATUS) in _PROMPT_STATUSES


def _by_step(step: int | None) -> float:
    return float("-inf") if step is None else step
