"""A partition's keys, gathered into groups and shelved by where each group stands.

Changes are filed one by one and only the groups they touch are judged again, so that keeping
up costs what changed, not what is there.
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
from rlskip.replay.readiness import Group, State

_PROMPT_STATUSES = (PENDING, RUNNING, FINISHED, FAILURE)


class PartitionIndex:
    """The groups of one partition.

    Parameters
    ----------
    judge
        Tells where a group stands; asked whenever one of the group's keys changed.
    """

    def __init__(self, judge: Callable[[Group], State]) -> None:
        self._judge = judge
        self._groups: dict[str, Group] = {}
        self._born = 0
        # state -> step -> uid -> group
        self._shelves: dict[State, dict[int | None, dict[str, Group]]] = defaultdict(dict)

    def apply(self, changes: Mapping[str, Tag | None]) -> None:
        """Take in what a watch reported: for each key its tag now, None when it is gone."""
        touched: dict[str, Group] = {}
        for key, tag in changes.items():
            self._file(key, tag, touched)
        for group in touched.values():
            self._shelve(group)

    def groups(self, state: State, step: int | None = None) -> Iterator[Group]:
        """The groups in `state`, oldest step first, then as they appeared; or those of a step."""
        shelves = self._shelves[state]
        for at in sorted(shelves, key=_by_step) if step is None else [step]:
            yield from sorted(shelves.get(at, {}).values(), key=attrgetter("number"))

    def steps(self, state: State) -> dict[int | None, int]:
        """How many groups are in `state`, by step."""
        return {step: len(shelf) for step, shelf in self._shelves[state].items()}

    def has_prompt(self, uid: str) -> bool:
        """Whether a prompt with a step is there under `uid`."""
        group = self._groups.get(uid)
        return group is not None and group.step is not None

    def take(self, groups: Iterable[Group]) -> None:
        """Mark groups as sampled: they stay, and are never sampled again."""
        for group in groups:
            group.taken = True
            self._shelve(group)

    def remove(self, uids: Iterable[str]) -> list[str]:
        """Forget these prompts with all their rows and markers; returns every key of theirs."""
        keys: list[str] = []
        for uid in uids:
            group = self._groups.pop(uid, None)
            if group is not None:
                keys += group.keys()
                self._unshelve(group)
        return keys

    def _file(self, key: str, tag: Tag | None, touched: dict[str, Group]) -> None:
        """Put a key where its tag says it belongs, or take it out; notes the groups touched.

        A uid may look like a row or a marker of another uid: then a key changes its place when
        a tag that says so arrives.
        """
        form = split_trajectory(key) or split_session(key)
        root = self._groups.get(key)
        if tag is not None and (tag.get(IS_PROMPT) or (form is None and _names_prompt(tag))):
            root = root or self._group(key)
            before = root.step
            root.root, tag = tag, None
            if root.step != before:  # submitted anew, under a uid that was sampled before
                root.taken = False
            touched[key] = root
        elif root is not None and root.root is not None:
            root.root, root.taken = None, False
            touched[key] = root
        if form is None:
            return
        if tag is not None and tag.get(IS_SESSION) and len(form) == 3:
            tag = None  # says it is a marker, and is not named like one: no key of ours
        uid = form[0]
        group = self._groups.get(uid) or (None if tag is None else self._group(uid))
        if group is None:
            return
        touched[uid] = group
        if len(form) == 3:
            _set(group.rows, form[1:], tag)
        else:
            _set(group.markers, form[1], tag)

    def _group(self, uid: str) -> Group:
        """The group of `uid`, new if need be."""
        group = self._groups.get(uid)
        if group is None:
            self._born += 1
            group = self._groups[uid] = Group(uid, self._born)
        return group

    def _shelve(self, group: Group) -> None:
        """Move a group to where it belongs now, out of the house if nothing of it is left."""
        if group.empty:
            self._groups.pop(group.uid, None)
            self._unshelve(group)
            return
        place = (self._judge(group), group.step)
        if group.place != place:
            self._unshelve(group)
            group.place = place
            self._shelves[place[0]].setdefault(place[1], {})[group.uid] = group

    def _unshelve(self, group: Group) -> None:
        if group.place is not None:
            state, step = group.place
            group.place = None
            del self._shelves[state][step][group.uid]
            if not self._shelves[state][step]:
                del self._shelves[state][step]


def _set(tags: dict, name: Hashable, tag: Tag | None) -> None:
    """Set a tag, or take it out."""
    if tag is None:
        tags.pop(name, None)
    else:
        tags[name] = tag


def _names_prompt(tag: Tag) -> bool:
    """Whether the tag of a key without a form is a prompt's, though it does not say so."""
    return N in tag or EXPECTED_ROLLOUTS in tag or tag.get(STATUS) in _PROMPT_STATUSES


def _by_step(step: int | None) -> float:
    return float("-inf") if step is None else step
