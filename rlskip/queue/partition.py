"""The groups of a partition by state, as a call samples them: of a queue, or of a dispatcher.

Changes are filed one by one, and only the groups they touch are judged again. The cost of an
update therefore depends on what changed, not on what the partition holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from rlskip import keys
from rlskip.config.other_nodes import ReplayConfig
from rlskip.queue.protocol import Tag
from rlskip.queue.readiness import Place, PromptGroup, State

# By these a key of no known form is a prompt's, though its tag does not say ``is_prompt``.
_OF_PROMPTS = {keys.N, keys.EXPECTED_ROLLOUTS, keys.STATUS}


class Partition:
    """Groups by uid and state.

    A group is a :class:`~rlskip.queue.readiness.PromptGroup`, or a dispatcher's: it has a `uid`, a
    `step`, a ``state(viable)`` and an ``outcome()``.
    """

    def __init__(self, name: str, config: ReplayConfig) -> None:
        self.name = name
        self.validates = name == keys.VAL
        self.usual = config.val_n if self.validates else config.n
        # The prompts that refills have submitted, until they are sampled or deleted: for which
        # step, if for one, and how many refills in a row led to each.
        self.refills: dict[str, tuple[int | None, int]] = {}
        self._viable = config.min_viable if config.on_incomplete == "min_viable" else None
        self._groups: dict[str, tuple[State, Any]] = {}  # in order of appearance

    def file(self, group: Any) -> None:
        """Add a group, or note that it has changed."""
        self._groups[group.uid] = group.state(self._viable), group

    def remove(self, uids: Iterable[str]) -> None:
        """Forget these groups."""
        for uid in uids:
            self._groups.pop(uid, None)

    def find(self, uid: str) -> Any:
        """The group of `uid`, or None."""
        return self._groups[uid][1] if uid in self._groups else None

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

    def apply(self, changes: Mapping[str, Tag | None]) -> None:
        """Apply what a watch reported: a key's current tag, or None for a deleted key."""
        touched: dict[str, PromptGroup] = {}
        for key, tag in changes.items():
            form = keys.split_trajectory(key) or keys.split_session(key)
            # A uid may look like a row or a marker of another uid. Such a key moves when a tag
            # that names its kind arrives.
            is_root = tag is not None and (
                tag.get(keys.IS_PROMPT) or (form is None and not _OF_PROMPTS.isdisjoint(tag))
            )
            if is_root or key in touched or key in self._groups:
                self._set(touched, key, (), tag if is_root else None)
            if form is not None:
                self._set(touched, form[0], form[1:], None if is_root else tag)
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
            touched[uid] = group = group or PromptGroup(uid, self.usual)
            group.set(place, tag)
