"""The groups of a partition by state, as a call samples them: of a queue, or of a dispatcher.

Changes are filed one by one, and only the groups they touch are judged again. The cost of an
update therefore depends on what changed, not on what the partition holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from rlskip import keys
from rlskip.config.other_nodes import ReplayConfig
from rlskip.queue.protocol import Tag
from rlskip.queue.readiness import Place, PromptGroup, PromptOutcome, State


class Group(Protocol):
    """What is sampled: a prompt's tags in a queue, or its rows in a dispatcher."""

    uid: str

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
        self._groups: dict[str, tuple[State, Any]] = {}  # in order of appearance

    def file(self, group: Group) -> None:
        """Add a group, or note that it has changed."""
        self._groups[group.uid] = group.state(self._viable), group

    def remove(self, uids: Iterable[str]) -> None:
        """Forget these groups."""
        for uid in uids:
            self._groups.pop(uid, None)

    def find(self, uid: str) -> Any:
        """The group of `uid`, or None."""
        return self._groups[uid][1] if uid in self._groups else None

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
            for state, group in self._groups.values()
            if state in states
            if (step is None or group.step == step) and (uids is None or group.uid in uids)
        ]
        return sorted(found, key=lambda group: -math.inf if group.step is None else group.step)

    def is_stale(self, submitted: int, step: int) -> bool:
        """Whether groups submitted at that step span more steps than the threshold allows."""
        return self.strategy == "drop" and step - submitted + 1 > self._most_steps

    def about_to_be_stale(self, step: int) -> bool:
        """Whether to wait for a running prompt that has reached the threshold."""
        running = self.groups(State.RUNNING) if self.strategy == "wait" else ()
        return any(step - group.step + 1 >= self._most_steps for group in running)


class QueuedPartition(Partition):
    """The groups of a queue's partition, by their tags."""

    def apply(self, changes: Mapping[str, Tag | None]) -> None:
        """Apply what a watch reported: each key's current tag, or None for a deleted key."""
        touched: dict[str, PromptGroup] = {}
        for key, tag in changes.items():
            form = keys.split_trajectory(key) or keys.split_session(key)
            # A uid may look like a row or a marker of another uid. Such a key moves when a tag
            # that names its kind arrives.
            is_root = tag is not None and (
                tag.get(keys.IS_PROMPT) or (form is None and _names_prompt(tag))
            )
            if is_root or key in touched or key in self._groups:
                self._set(touched, key, (), tag if is_root else None)
            if form is not None:
                # A marker's tag under a row's name is ignored.
                is_odd = tag is not None and len(form) == 3 and tag.get(keys.IS_SESSION)
                self._set(touched, form[0], form[1:], None if is_root or is_odd else tag)
        for uid, group in touched.items():
            if group.tags:
                self.file(group)
            else:
                self.remove([uid])

    def _set(
        self, touched: dict[str, PromptGroup], uid: str, place: Place, tag: Tag | None
    ) -> None:
        group = touched.get(uid) or self.find(uid)
        if group is not None or tag is not None:
            touched[uid] = group = group or self.empty_group(uid)
            group.set(place, tag)


def _names_prompt(tag: Tag) -> bool:
    """Whether a tag without ``is_prompt``, at a key of no known form, belongs to a prompt."""
    statuses = keys.PENDING, keys.RUNNING, keys.FINISHED, keys.FAILURE
    return keys.N in tag or keys.EXPECTED_ROLLOUTS in tag or tag.get(keys.STATUS) in statuses
