"""What a replay buffer knows of its queue: the groups of each partition, by state and step.

Changes are filed one by one, and only the groups they touch are judged again. The cost of an
update therefore depends on what changed, not on what the partition holds.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

from rlskip.config.replay import ReplayConfig
from rlskip.keys import (
    EXPECTED_ROLLOUTS,
    FAILURE,
    FINISHED,
    IS_PROMPT,
    IS_SESSION,
    PENDING,
    RUNNING,
    STATUS,
    VAL,
    N,
    split_session,
    split_trajectory,
)
from rlskip.queue.protocol import MissingKeysError, Row, Tag, TrajectoryQueue
from rlskip.queue.readiness import Expected, PromptGroup, State
from rlskip.queue.rows import to_rows

_PROMPT_STATUSES = (PENDING, RUNNING, FINISHED, FAILURE)


class Partition:
    """The groups of one partition, and how old they may be.

    Attributes
    ----------
    name, validates
        Its name, and whether it is the partition of validation prompts.
    """

    # Each group is on one shelf, that of its state and step, and no shelf is empty; `_shelve`
    # restores this after a change.

    def __init__(self, name: str, config: ReplayConfig) -> None:
        self.name = name
        self.validates = name == VAL
        viable = config.min_viable if config.on_incomplete == "min_viable" else None
        sessions = config.val_n if self.validates else config.n
        self._expects = Expected(sessions, viable)
        self._strategy = "none" if self.validates else config.max_off_policy_strategy
        self._most_steps = config.max_off_policy_threshold
        self._groups: dict[str, PromptGroup] = {}
        self._next_number = 0
        # state -> step -> uid -> group
        self._shelves: dict[State, dict[int | None, dict[str, PromptGroup]]] = defaultdict(dict)

    # -- what there is -------------------------------------------------------------------------

    def groups(
        self, state: State, step: int | None = None, uids: set[str] | None = None
    ) -> Iterator[PromptGroup]:
        """The groups in `state`, of one step or of all; by step, then in order of appearance.

        Those of `uids`; None: all.
        """
        shelves = self._shelves[state]
        for at in sorted(shelves, key=_by_step) if step is None else [step]:
            for group in sorted(shelves.get(at, {}).values(), key=attrgetter("number")):
                if uids is None or group.uid in uids:
                    yield group

    def count(self, state: State, step: int | None = None, uids: set[str] | None = None) -> int:
        """The number of these groups."""
        shelves = self._shelves[state]
        found = shelves.values() if step is None else [shelves.get(step, {})]
        if uids is None:
            return sum(map(len, found))
        return sum(uid in uids for shelf in found for uid in shelf)

    def uids(self) -> set[str]:
        """The prompts of which there is any key, and those that a refill has announced."""
        return {*self._groups}

    def steps(self, state: State) -> list[int | None]:
        """The steps of the groups in `state`."""
        return list(self._shelves[state])

    def find(self, uid: str) -> PromptGroup:
        """The group of `uid`; an empty one if the partition has no keys of it."""
        return self._groups.get(uid) or PromptGroup(uid, 0, self._expects)

    # -- age -----------------------------------------------------------------------------------

    def is_stale(self, submitted: int | None, step: int) -> bool:
        """Whether groups submitted at that step span more steps than the threshold allows."""
        return self._spans("drop", submitted, step, 1)

    def stale(self, step: int, uids: set[str] | None) -> list[PromptGroup]:
        """The stale groups that a call for `uids`, or for all, could sample otherwise."""
        states = (State.COMPLETE, State.INCOMPLETE)
        places = [(state, at) for state in states for at in self.steps(state)]
        stale = [(state, at) for state, at in places if self.is_stale(at, step)]
        return [group for state, at in stale for group in self.groups(state, at, uids)]

    def about_to_be_stale(self, step: int) -> bool:
        """Whether to wait for a running prompt that has reached the threshold."""
        return any(self._spans("wait", at, step, 0) for at in self.steps(State.RUNNING))

    def _spans(self, strategy: str, submitted: int | None, step: int, more: int) -> bool:
        """Whether the strategy is `strategy`, and a group spans the threshold and `more` steps."""
        most = self._most_steps if self._strategy == strategy else None
        return most is not None and submitted is not None and step - submitted + 1 >= most + more

    # -- changes -------------------------------------------------------------------------------

    def apply(self, changes: Mapping[str, Tag | None]) -> None:
        """Apply what a watch reported: each key's current tag, or None for a deleted key."""
        touched: dict[str, PromptGroup] = {}
        for key, tag in changes.items():
            self._file(key, tag, touched)
        for group in touched.values():
            self._shelve(group)

    def announce(self, uid: str, refills: int) -> None:
        """A refill has submitted this prompt; so many in a row led to it."""
        group = self._group(uid)
        group.refills = refills
        group.announced = True
        self._shelve(group)

    def is_again(self, before: PromptGroup) -> None:
        """A group that was taken out is in the queue again: it is what it was."""
        group = self._group(before.uid)
        for name in ("number", "refills", "told", "varies", "metric"):
            setattr(group, name, getattr(before, name))
        self._shelve(group)

    def mark_sampled(self, groups: Iterable[PromptGroup]) -> None:
        """Mark groups as sampled: they stay in the partition and are never sampled again."""
        for group in groups:
            group.sampled = True
            self._shelve(group)

    def remove(self, uids: Iterable[str]) -> None:
        """Forget these prompts, which the queue does not hold any more."""
        for uid in uids:
            group = self._groups.pop(uid, None)
            if group is not None:
                self._unshelve(group)

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
            group = self._groups[uid] = PromptGroup(uid, self._next_number, self._expects)
            self._next_number += 1
        return group

    def _shelve(self, group: PromptGroup) -> None:
        """Move a group to the shelf of its current state; an empty group is removed."""
        if group.step is not None:
            group.announced = False
        if group.empty:
            self._groups.pop(group.uid, None)
            self._unshelve(group)
            return
        shelf = (group.state(), group.step)
        if group.shelf != shelf:
            self._unshelve(group)
            group.shelf = shelf
            self._shelves[shelf[0]].setdefault(shelf[1], {})[group.uid] = group

    def _unshelve(self, group: PromptGroup) -> None:
        if group.shelf is not None:
            state, step = group.shelf
            group.shelf = None
            del self._shelves[state][step][group.uid]
            if not self._shelves[state][step]:
                del self._shelves[state][step]


class Partitions:
    """The partitions of a queue by name. Not thread-safe: the buffer holds its lock."""

    def __init__(self, queue: TrajectoryQueue, config: ReplayConfig) -> None:
        self._queue = queue
        self._config = config
        self._partitions: dict[str, Partition] = {}
        #: Reports the changes of the queue; whoever waits on it needs no lock.
        self.watch = queue.watch()

    def __getitem__(self, name: str) -> Partition:
        if name not in self._partitions:
            self._partitions[name] = Partition(name, self._config)
        return self._partitions[name]

    def sync(self) -> None:
        """Apply what has changed in the queue."""
        for name, changes in self.watch.poll().items():
            self[name].apply(changes)

    def take_out(
        self, groups: Sequence[PromptGroup], name: str, keep: bool = False
    ) -> list[tuple[PromptGroup, dict[str, Row]]]:
        """Delete groups with their rows and markers from the queue.

        Returns them for :meth:`put_back`, with their rows if these are to be kept.
        """
        rows = self._rows_of(groups, name) if keep else {}
        taken = [
            (group, {key: rows[key] for key, _ in group.all_rows() if key in rows})
            for group in groups
        ]
        # In this order: if the queue raises, the keys are still known, and can be deleted later.
        self._queue.delete([key for group in groups for key in group.keys()], name)  # noqa: SIM118
        self[name].remove(group.uid for group in groups)
        # A polling watch must see them deleted before a refill puts the same keys again.
        self.sync()
        return taken

    def put_back(self, taken: Sequence[tuple[PromptGroup, dict[str, Row]]], name: str) -> None:
        """Put groups into the queue again as they were taken out."""
        for group, rows in taken:
            for key, tag in group.tags():
                fields = [rows[key]] if key in rows else None
                self._queue.put([key], name, fields, [tag])
        self.sync()
        for group, _ in taken:
            self[name].is_again(group)

    def _rows_of(self, groups: Sequence[PromptGroup], name: str) -> dict[str, Row]:
        """The rows of these groups by key, but for keys without fields."""
        keys = [key for group in groups for key, _ in group.all_rows()]
        try:
            return dict(zip(keys, to_rows(self._queue.get(keys, name)), strict=True))
        except MissingKeysError:  # they hold different fields
            found: dict[str, Row] = {}
            for key in keys:
                with contextlib.suppress(MissingKeysError):
                    found[key] = to_rows(self._queue.get([key], name))[0]
            return found


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
