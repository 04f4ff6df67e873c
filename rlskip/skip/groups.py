"""Which dumped group replaces which prompt's, and what a dump keeps of a group."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from rlskip.keys import (
    DUMP_CONTENT,
    DUMP_POSITION,
    DUMP_STEP,
    EXPECTED_ROLLOUTS,
    N,
    split_trajectory,
    uid_of,
)
from rlskip.store import CorruptDumpError, DumpMeta

Tag = Mapping[str, Any]

Dump = tuple[str, int, int]
"""A part of a step: the directory of its run, the step, and its number."""


@attrs.frozen
class QueuedGroup:
    """One prompt's group, as it is dumped.

    Parameters
    ----------
    uid
        The uid under which it was generated.
    tags
        Every key of the group without its uid ("" the root, "_0_1" a row, "_sess0" a marker)
        with its tag.
    """

    uid: str
    tags: dict[str, Tag]

    @property
    def root(self) -> Tag:
        return self.tags[""]

    def is_complete(self, sampled: Iterable[str], otherwise: int | None) -> bool:
        """Whether as many distinct sessions have rows among `sampled` as were expected."""
        rows = (split_trajectory(key) for key in sampled)
        sessions = {row[1] for row in rows if row is not None and row[0] == self.uid}
        expected = self.root.get(EXPECTED_ROLLOUTS) or self.root.get(N) or otherwise or 1
        return len(sessions) >= expected


def gather(listing: Mapping[str, Tag], uids: Iterable[str]) -> list[QueuedGroup]:
    """The groups of these prompts that are to be dumped, from all that a partition holds."""
    groups = {
        uid: QueuedGroup(uid, {"": listing[uid]})
        for uid in uids
        if listing.get(uid, {}).get(DUMP_STEP) is not None
    }
    for key, tag in listing.items():
        uid = uid_of(key)
        if uid is not None and key not in groups and uid in groups:
            groups[uid].tags[key[len(uid) :]] = tag
    return list(groups.values())


@attrs.frozen
class DumpedGroup:
    """Where a group lies in a step's dump, and what it was generated for.

    ``size`` is the directory of its run, if that has another number of prompts a step.
    """

    part: int
    index: int
    content: str | None
    position: int
    complete: bool
    step: int = 0
    size: str = ""

    @property
    def dump(self) -> Dump:
        """The part that holds it."""
        return self.size, self.step, self.part

    @classmethod
    def of_part(cls, part: int, meta: DumpMeta, size: str = "") -> list[DumpedGroup]:
        """The groups that a part's :func:`summary` names.

        Raises
        ------
        CorruptDumpError
            It is not such a summary.
        """
        try:
            groups = [
                cls(part, index, content, position, complete, meta.step, size)
                for index, (content, position, complete) in enumerate(meta.info["groups"])
            ]
            if any(type(group.position) is not int for group in groups):
                raise TypeError("a position")
            hash(tuple(group.content for group in groups))
            return groups
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptDumpError(
                "its meta.json does not describe groups", f"step {meta.step}, part {part}"
            ) from error


def summary(group: QueuedGroup, complete: bool) -> list[Any]:
    """What a part's ``meta.json`` has of a group: content, position, whether it is complete."""
    return [group.root[DUMP_CONTENT], group.root[DUMP_POSITION], complete]


def without_superseded(groups: Sequence[DumpedGroup]) -> list[DumpedGroup]:
    """By position in the batch, without incomplete groups that have a complete twin."""
    complete = {(group.content, group.position) for group in groups if group.complete}
    kept = {
        (
            group.content,
            group.position,
            (group.part, group.index) if group.complete else None,
        ): group
        for group in groups
        if group.complete or (group.content, group.position) not in complete
    }
    return sorted(kept.values(), key=lambda group: (group.position, group.part, group.index))


def by_content(
    groups: Sequence[DumpedGroup], contents: Sequence[str | None]
) -> list[DumpedGroup | None]:
    """For each prompt a group of the same content, each group once; None where there is none.

    Complete groups come first.
    """
    shelves: dict[str | None, deque[DumpedGroup]] = defaultdict(deque)
    for group in sorted(groups, key=lambda group: not group.complete):
        shelves[group.content].append(group)
    return [
        shelves[content].popleft() if content is not None and shelves[content] else None
        for content in contents
    ]


def by_position(groups: Sequence[DumpedGroup], prompts: int) -> list[DumpedGroup | None]:
    """For each prompt the group at its position; None beyond the last."""
    return [groups[i] if i < len(groups) else None for i in range(prompts)]
