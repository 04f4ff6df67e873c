"""Groups of a queue: what a dump keeps of one, whose it replaces, and how it enters the queue."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from rlskip.batch.meta import plain
from rlskip.keys import (
    DUMP_CONTENT,
    DUMP_POSITION,
    DUMP_STEP,
    EXPECTED_ROLLOUTS,
    REPLAYED,
    STEP_TAGS,
    N,
    dump_tag,
    split_trajectory,
    uid_of,
)
from rlskip.skip.run_dumps import Group
from rlskip.skip.step_calls import Key
from rlskip.store import CorruptDumpError, DumpMeta, Identity
from rlskip.store.layout import call_number

if TYPE_CHECKING:
    from rlskip.queue import Row, Tag, TrajectoryQueue


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


def groups_in(listing: Mapping[str, Tag], uids: Iterable[str]) -> list[QueuedGroup]:
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
    """Where a dump has a group, and what it was generated for."""

    key: Key
    index: int
    content: str | None
    position: int
    complete: bool
    checksum: str = ""  # of the dump: what replaces it has other groups

    @property
    def place(self) -> tuple[int, int, int]:
        """By what groups of one step are in order."""
        return self.position, call_number(self.key.call), self.index

    @property
    def part(self) -> Group:
        """As the ledger knows it."""
        return Group(self.key, self.index, 1, self.checksum, self.content or "", Identity())

    @classmethod
    def of(cls, part: Group) -> DumpedGroup:
        """A complete one that was found by its prompt."""
        return cls(part.key, part.start, part.digest, 0, True, part.checksum)

    @classmethod
    def of_part(cls, key: Key, meta: DumpMeta) -> list[DumpedGroup]:
        """The groups that the :func:`summary` of a part names.

        Raises
        ------
        CorruptDumpError
            It is not such a summary.
        """
        try:
            groups = [
                cls(key, index, content, position, complete, meta.checksum)
                for index, (content, position, complete) in enumerate(meta.info["groups"])
            ]
            if any(type(group.position) is not int for group in groups):
                raise TypeError("a position")
            hash(tuple(group.content for group in groups))
            return groups
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptDumpError(
                "its meta.json does not describe groups",
                str(key),
            ) from error


def summary(group: QueuedGroup, complete: bool) -> list[Any]:
    """What a part's ``meta.json`` has of a group: content, position, whether it is complete."""
    return [group.root[DUMP_CONTENT], group.root[DUMP_POSITION], complete]


def without_superseded(groups: Sequence[DumpedGroup]) -> list[DumpedGroup]:
    """By position in the batch, without incomplete groups that have a complete twin."""
    complete = {(group.content, group.position) for group in groups if group.complete}
    kept = {
        (group.content, group.position, group.place if group.complete else None): group
        for group in groups
        if group.complete or (group.content, group.position) not in complete
    }
    return sorted(kept.values(), key=lambda group: group.place)


def by_content(
    groups: Sequence[DumpedGroup], contents: Sequence[str | None]
) -> list[DumpedGroup | None]:
    """For each prompt a group of the same content, each group once; None where there is none.

    Complete groups come first.
    """
    left: dict[str | None, deque[DumpedGroup]] = defaultdict(deque)
    for group in sorted(groups, key=lambda group: not group.complete):
        left[group.content].append(group)
    return [
        left[content].popleft() if content is not None and left[content] else None
        for content in contents
    ]


def groups_of_parts(metas: Mapping[Key, DumpMeta]) -> list[DumpedGroup]:
    return [group for dump, meta in metas.items() for group in DumpedGroup.of_part(dump, meta)]


@attrs.frozen
class Plan:
    """What becomes of a submitted batch: which prompts are replayed, and from where."""

    step: int
    source: int
    uids: list[str]
    contents: list[str | None]
    metas: Mapping[Key, DumpMeta]
    groups: list[DumpedGroup | None]  # for each prompt the complete group that replaces it
    by_prompt: bool = False

    @property
    def rest(self) -> list[int]:
        """The prompts to generate."""
        return [i for i, group in enumerate(self.groups) if group is None]

    @property
    def served(self) -> int:
        return len(self.groups) - len(self.rest)

    def __str__(self) -> str:
        what = "the run serves" if self.by_prompt else f"the dump of step {self.source} serves"
        return f"{what} {self.served} of the batch's {len(self.uids)} prompts"


# -- back into the queue -------------------------------------------------------------------------


@attrs.frozen
class GroupReplay:
    """What enters the queue for the prompts that are replayed.

    Attributes
    ----------
    roots
        The tags of the groups' roots.
    bare
        Markers, and rows that no batch takes: tags only.
    rows
        One mapping of keys to rows and tags for each part, because fields may differ.
    """

    roots: dict[str, Tag] = attrs.field(factory=dict)
    bare: dict[str, Tag] = attrs.field(factory=dict)
    rows: list[dict[str, tuple[Row, Tag]]] = attrs.field(factory=list)

    def add(
        self,
        chosen: Iterable[tuple[str, DumpedGroup]],
        loaded: Mapping[str, Any],
        columns: Iterable[Row],
        step: int,
    ) -> None:
        """Add groups of a part, each under its new uid, as if they were generated at `step`.

        `columns` are the rows of ``loaded["fields"]`` without the fields that are dropped.

        Raises
        ------
        LookupError, TypeError, ValueError, AttributeError
            The part does not hold groups of a queue.
        """
        fields = dict(zip(loaded["keys"], columns, strict=True))
        rows: dict[str, tuple[Row, Tag]] = {}
        new_keys: dict[str, str] = {}
        for uid, dumped in chosen:
            old = QueuedGroup(**loaded["groups"][dumped.index])
            for suffix, tag in {"": old.root, **old.tags}.items():
                key = uid + suffix
                if suffix and uid_of(key) != uid:
                    raise ValueError(f"{suffix!r} is not a row or a marker of a group")
                tag = _shifted(tag, step - dumped.key.step)
                row = fields.get(old.uid + suffix)
                if not suffix:
                    kept = {name: tag[name] for name in tag if name not in dump_tag(0, 0, None)}
                    self.roots[key] = {**kept, REPLAYED: dumped.key.step}
                elif row is None:
                    self.bare[key] = tag
                else:
                    rows[key] = (_renamed(row, old.uid, uid), tag)
                    new_keys[old.uid + suffix] = key
        # In the order in which they were sampled: a sampler that takes rows in order of arrival
        # then sums in the same order.
        sampled = (new_keys[key] for key in loaded["keys"] if key in new_keys)
        self.rows.append({key: rows[key] for key in sampled})

    def put(self, queue: TrajectoryQueue, partition_id: str) -> None:
        """Rows, markers, then all roots at once: no group is finished before it is complete."""
        for rows in self.rows:
            if rows:
                fields, tags = zip(*rows.values(), strict=True)
                queue.put(list(rows), partition_id, fields, tags)
        for tags_only in (self.bare, self.roots):
            if tags_only:
                queue.put(list(tags_only), partition_id, tags=list(tags_only.values()))


def _shifted(tag: Tag, steps: int) -> Tag:
    """As the trajectory would be tagged, had it been generated so many steps later."""
    return {
        name: value + steps if name in STEP_TAGS and isinstance(value, int) else value
        for name, value in tag.items()
    }


def _renamed(row: Row, old: str, new: str) -> Row:
    named = "uid" in row and str(plain(row["uid"])) == old
    return {**row, "uid": new} if named and old != new else row
