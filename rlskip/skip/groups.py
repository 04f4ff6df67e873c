"""Groups of a queue: what a dump keeps of one, which prompts they are for, how they enter a queue.

A dump keeps of a group its ``uid`` and ``tags``: the tag of every key by what follows the uid, ""
for the root, "_0_1" for a row, "_sess0" for a marker.
"""

from __future__ import annotations

import operator
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from rlskip.batch.meta import plain
from rlskip.errors import ConfigError
from rlskip.keys import (
    DUMP_IDENTITY,
    DUMP_STEP,
    EXPECTED_ROLLOUTS,
    REPLAYED,
    ROLLOUT_ROOT_KEYS,
    STEP_TAGS,
    TRAIN,
    N,
    dump_tag,
    split_trajectory,
    uid_of,
)
from rlskip.skip.call import Call, Stage
from rlskip.skip.run_dumps import Group, PromptGroups
from rlskip.store import Identity

if TYPE_CHECKING:
    from rlskip.queue import Row, Tag, TrajectoryQueue

SUBMIT, REFILL, SAMPLE, EVICT = _PHASES = ("submit", "refill", "sample", "evict")


def phase_of(stage: Stage) -> str:
    """Which seam of the trainer `stage` is; raises ConfigError for another than the four."""
    phase = stage.options.get("phase", SUBMIT)
    if phase not in _PHASES:
        where = f"SkipManager.annotate of {stage.name}"
        raise ConfigError(f"phase {phase!r} is unknown", where, f"use {', '.join(_PHASES)}")
    return str(phase)


def queue_of(call: Call) -> tuple[TrajectoryQueue, str]:
    """The queue that the stage's options name, and the partition; or ConfigError without one."""
    queue = call.stage.options.get("queue")
    if callable(queue):
        queue = queue(*call.args, **call.kwargs)
    if queue is None:
        raise ConfigError(
            f"role {call.stage.role} does not know the queue",
            f"SkipManager.annotate of {call.stage.name}",
            "name it: annotate(..., queue=lambda self, *args, **kwargs: self.queue)",
        )
    return queue, str(call.stage.options.get("partition_id", TRAIN))


def groups_of_batch(queue: TrajectoryQueue, batch: Any) -> list[dict[str, Any]]:
    """Of each dump that keeps groups of a batch what it has: groups, keys, and fields.

    The groups of one were submitted at the same step, and depend on the same.
    """
    uid_of_row = {key: row[0] for key in batch.keys if (row := split_trajectory(key))}
    roots = (batch.extra_info or {}).get(ROLLOUT_ROOT_KEYS) or uid_of_row.values()
    listing = queue.list(batch.partition_id)
    groups: dict[str, dict[str, Any]] = {
        uid: {"uid": uid, "tags": {"": listing[uid]}}
        for uid in roots
        if listing.get(uid, {}).get(DUMP_STEP) is not None
    }
    for key, tag in listing.items():
        uid = uid_of(key)
        if uid is not None and key not in groups and uid in groups:
            groups[uid]["tags"][key[len(uid) :]] = tag
    alike: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for group in groups.values():
        root = group["tags"][""]
        alike[root[DUMP_STEP], root[DUMP_IDENTITY]].append(group)
    parts = []
    for some in alike.values():
        uids = {group["uid"] for group in some}
        keys = [key for key, uid in uid_of_row.items() if uid in uids]
        if keys:  # else these groups have no rows: nothing to replay
            fields = queue.get(keys, batch.partition_id)
            parts.append({"groups": some, "keys": keys, "fields": fields})
    return parts


def is_complete(group: Mapping[str, Any], sampled: Iterable[str], otherwise: int | None) -> bool:
    """Whether as many distinct sessions have rows among `sampled` as were expected."""
    rows = (split_trajectory(key) for key in sampled)
    sessions = {row[1] for row in rows if row is not None and row[0] == group["uid"]}
    root = group["tags"][""]
    return len(sessions) >= (root.get(EXPECTED_ROLLOUTS) or root.get(N) or otherwise or 1)


def without_superseded(groups: Sequence[Group], by_place: bool) -> list[Group]:
    """By position in the batch, of each prompt one: a complete group rather than another.

    Of prompts that were submitted under other conditions each has its own. Further complete ones
    stay, too, for prompts that are asked for more often, unless groups serve `by_place`.
    """
    metas = PromptGroups(groups).metas.items()
    made = {key: meta.identity.digest(whole=True) for key, meta in metas if meta.identity}
    best: dict[tuple[str, str, int], Group] = {}
    more = []
    for group in sorted(groups, key=lambda group: not group.count):
        first = best.setdefault((made[group.key], group.digest, group.position), group)
        if first is not group and group.count and group.digest and not by_place:
            more.append(group)
    return sorted([*best.values(), *more], key=lambda group: group.position)


@attrs.define
class Submitted:
    """What was submitted at a step so far: batches and their refills."""

    prompts: int = 0
    #: The groups that the present visit of the step found at its first batch: what the visit
    #: generates serves none of its later batches. None before that.
    found: list[Group] | None = None
    served: set[Group] = attrs.field(factory=set)
    #: Whether this job generates some of it, which its dump may not have yet.
    generates: bool = False
    #: What the rollouts of its last batch depend on besides their prompts; None: not known here.
    identity: Identity | None = None

    def match(
        self, contents: Sequence[str | None], present: Identity | None
    ) -> tuple[list[Group | None], list[Group]]:
        """For each prompt a group that the visit found, and has not used, made as the `present`.

        And of the prompts without one the groups that were made in another way. None: any are
        taken, and one after the other, as often as it takes.
        """
        left = [group for group in self.found or () if group not in self.served]
        if present is None:
            if len(left) < len(contents):
                self.served.clear()  # one that used all starts over
                left = self.found or []
            return [*left, *[None] * len(contents)][: len(contents)], []
        made = {group.key: group.made for group in left}
        fits = {key: present.fits(identity) for key, identity in made.items()}
        fitting = [group for group in left if fits[group.key]]
        found: list[Group | None] = [None] * len(contents)
        if any(contents):  # they have more than uids
            unused = defaultdict[str | None, deque[Group]](deque)
            for group in sorted(fitting, key=lambda group: not group.count):  # complete ones first
                unused[group.digest].append(group)
            found = [unused[one].popleft() if unused[one] else None for one in contents]
        elif None in contents and len(fitting) == len(contents):
            found = [*fitting]
        lacking = {one for one, group in zip(contents, found, strict=True) if group is None}
        odd = [one for one in left if not fits[one.key] and (one.digest or None) in lacking]
        return found, odd


@attrs.define(eq=False)
class Plan:
    """What becomes of a submitted batch: the complete group that replaces each prompt, or None.

    ``position`` is that of its first prompt in the step; ``enters`` what enters the queue for the
    groups, once they are loaded.
    """

    uids: list[str]
    contents: list[str | None]
    groups: list[Group | None]
    where: str
    position: int
    enters: Entering | None = None

    @property
    def rest(self) -> list[int]:
        """The prompts to generate."""
        return [i for i, group in enumerate(self.groups) if group is None]

    @property
    def served(self) -> PromptGroups:
        return PromptGroups(group for group in self.groups if group is not None)

    def __str__(self) -> str:
        return f"{self.where} serves {len(self.served)} of the batch's {len(self.uids)} prompts"


@attrs.frozen
class Entering:
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
        fields = dict(zip(loaded["keys"], enumerate(columns), strict=True))
        rows: list[tuple[int, str, tuple[Row, Tag]]] = []
        for uid, dumped in chosen:
            old, shift = loaded["groups"][dumped.start], step - dumped.key.step
            for suffix, then in {"": old["tags"][""], **old["tags"]}.items():
                key = uid + suffix
                if suffix and uid_of(key) != uid:
                    raise ValueError(f"{suffix!r} is not a row or a marker of a group")
                tag = {
                    name: value + shift if name in STEP_TAGS and isinstance(value, int) else value
                    for name, value in then.items()
                }
                if not suffix:
                    kept = {name: tag[name] for name in tag if name not in dump_tag(0, 0, "", "")}
                    self.roots[key] = {**kept, REPLAYED: dumped.key.step}
                elif (place := fields.get(old["uid"] + suffix)) is None:
                    self.bare[key] = tag
                else:
                    number, row = place
                    if "uid" in row and str(plain(row["uid"])) == old["uid"]:
                        row = {**row, "uid": uid}
                    rows.append((number, key, (row, tag)))
        # In the order in which they were sampled: a sampler that takes rows in order of arrival
        # then sums in the same order.
        rows.sort(key=operator.itemgetter(0))
        self.rows.append({key: row for _, key, row in rows})

    def put(self, queue: TrajectoryQueue, partition_id: str) -> None:
        """Rows, markers, then all roots at once: no group is finished before it is complete."""
        for rows in filter(None, self.rows):
            fields, tags = zip(*rows.values(), strict=True)
            queue.put(list(rows), partition_id, fields, tags)
        for tags_only in filter(None, (self.bare, self.roots)):
            queue.put(list(tags_only), partition_id, tags=list(tags_only.values()))
