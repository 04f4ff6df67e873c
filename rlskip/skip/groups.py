"""Groups of a queue: what a dump keeps of one, whose it replaces, and how it enters the queue."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from rlskip.batch.meta import plain
from rlskip.keys import (
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
from rlskip.store import DumpMeta
from rlskip.store.layout import call_number

if TYPE_CHECKING:
    from rlskip.queue import Row, Tag, TrajectoryQueue


@attrs.frozen
class QueuedGroup:
    """One prompt's group, as it is dumped.

    ``tags`` has the tag of every key of the group by what follows the uid: "" for the root, "_0_1"
    for a row, "_sess0" for a marker.
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


def without_superseded(groups: Sequence[Group]) -> list[Group]:
    """By position in the batch, of each prompt one: a complete group rather than another."""
    best: dict[tuple[str, int], Group] = {}
    for group in sorted(groups, key=lambda group: not group.count):
        best.setdefault((group.digest, group.position), group)
    return sorted(best.values(), key=lambda g: (g.position, call_number(g.key.call), g.start))


def by_content(groups: Sequence[Group], contents: Sequence[str | None]) -> list[Group | None]:
    """For each prompt a group of its content, complete ones first, each once; None without."""
    left: dict[str | None, deque[Group]] = defaultdict(deque)
    for group in sorted(groups, key=lambda group: not group.count):
        left[group.digest].append(group)
    return [left[content].popleft() if left.get(content) else None for content in contents]


@attrs.frozen
class Plan:
    """What becomes of a submitted batch: which prompts are replayed, and from where.

    ``groups`` has for each prompt the complete group that replaces it, and `metas` the metas of
    their dumps. By prompt they are of any step, else of step `source`.
    """

    step: int
    source: int
    uids: list[str]
    contents: list[str | None]
    metas: Mapping[Key, DumpMeta]
    groups: list[Group | None]
    by_prompt: bool

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


@attrs.frozen
class GroupReplay:
    """What enters the queue for the prompts that are replayed."""

    roots: dict[str, Tag] = attrs.field(factory=dict)
    #: Markers, and rows that no batch takes: tags only.
    bare: dict[str, Tag] = attrs.field(factory=dict)
    #: By key, for each part on its own, because fields may differ.
    rows: list[dict[str, tuple[Row, Tag]]] = attrs.field(factory=list)

    def add(
        self,
        chosen: Iterable[tuple[str, Group]],
        loaded: Mapping[str, Any],
        columns: Iterable[Row],
        step: int,
    ) -> None:
        """Add groups of a part, each under its new uid, as if they were generated at `step`.

        `columns` are the rows of ``loaded["fields"]`` without the fields that are dropped. A part
        that does not hold groups of a queue raises any error.
        """
        fields = dict(zip(loaded["keys"], columns, strict=True))
        rows: dict[str, tuple[Row, Tag]] = {}
        new_keys: dict[str, str] = {}
        for uid, dumped in chosen:
            old = QueuedGroup(**loaded["groups"][dumped.start])
            for suffix, then in {"": old.root, **old.tags}.items():
                key = uid + suffix
                if suffix and uid_of(key) != uid:
                    raise ValueError(f"{suffix!r} is not a row or a marker of a group")
                shift = step - dumped.key.step
                tag = {
                    name: value + shift if name in STEP_TAGS and isinstance(value, int) else value
                    for name, value in then.items()
                }
                if not suffix:
                    kept = {name: tag[name] for name in tag if name not in dump_tag(0, 0, None)}
                    self.roots[key] = {**kept, REPLAYED: dumped.key.step}
                elif (row := fields.get(old.uid + suffix)) is None:
                    self.bare[key] = tag
                else:
                    if "uid" in row and str(plain(row["uid"])) == old.uid:
                        row = {**row, "uid": uid}
                    rows[key] = row, tag
                    new_keys[old.uid + suffix] = key
        # In the order in which they were sampled: a sampler that takes rows in order of arrival
        # then sums in the same order.
        sampled = (new_keys[key] for key in loaded["keys"] if key in new_keys)
        self.rows.append({key: rows[key] for key in sampled})

    def put(self, queue: TrajectoryQueue, partition_id: str) -> None:
        """Rows, markers, then all roots at once: no group is finished before it is complete."""
        for rows in filter(None, self.rows):
            fields, tags = zip(*rows.values(), strict=True)
            queue.put(list(rows), partition_id, fields, tags)
        for tags_only in filter(None, (self.bare, self.roots)):
            queue.put(list(tags_only), partition_id, tags=list(tags_only.values()))
