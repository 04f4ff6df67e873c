"""Dumped groups on their way back into the queue, under the uids of the prompts that they serve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from rlskip.keys import REPLAYED, STEP_TAGS, dump_tag, uid_of
from rlskip.queue import Row, Tag, TrajectoryQueue
from rlskip.skip.groups import DumpedGroup, QueuedGroup


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
                tag = _shifted(tag, step - dumped.step)
                row = fields.get(old.uid + suffix)
                if not suffix:
                    self.roots[key] = _replayed(tag, dumped.step)
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


def _replayed(root: Tag, source: int) -> Tag:
    to_dump: Mapping[str, Any] = dump_tag(0, 0, None)
    return {**{name: root[name] for name in root if name not in to_dump}, REPLAYED: source}


def _renamed(row: Row, old: str, new: str) -> Row:
    return {**row, "uid": new} if row.get("uid") == old else row
