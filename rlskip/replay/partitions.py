"""What a replay buffer knows of its queue: the groups of each partition, and how old they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rlskip.config.replay import ReplayConfig
from rlskip.keys import STATUS, VAL, attempt_of, split_trajectory
from rlskip.queue import KVBatchMeta, Tag, TrajectoryQueue
from rlskip.replay.group_index import PartitionIndex
from rlskip.replay.readiness import PromptGroup, PromptOutcome, State, state_of
from rlskip.replay.sampling import SampleCall


class Partition:
    """The groups of one partition, and what the config asks of them.

    Attributes
    ----------
    index
        The groups.
    pending_refills
        The uids that a refill announced and the queue does not hold yet.
    refills
        By uid, the number of refills in a row that led to this prompt.
    """

    def __init__(self, name: str, config: ReplayConfig, drops_late_writes: bool) -> None:
        self._config = config
        self._validates = name == VAL
        # The number of sessions of a prompt whose tag does not hold it.
        self._expected = config.val_n if self._validates else config.n
        k = config.min_viable if config.on_incomplete == "min_viable" else None
        self.index = PartitionIndex(
            lambda group: state_of(group, self._expected, k), drops_late_writes
        )
        self.pending_refills: set[str] = set()
        self.refills: dict[str, int] = {}

    def apply(self, changes: Mapping[str, Tag | None]) -> None:
        """Apply what a watch reported."""
        self.index.apply(changes)
        self.pending_refills.difference_update(
            [uid for uid in self.pending_refills if self.index.has_prompt(uid)]
        )

    def count(self, state: State, step: int | None = None) -> int:
        """The number of groups in `state`, of one step or of all."""
        steps = self.index.steps(state)
        return sum(steps.values()) if step is None else steps.get(step, 0)

    def outcomes(self, groups: Iterable[PromptGroup]) -> list[PromptOutcome]:
        return [PromptOutcome.of(group, self._expected) for group in groups]

    def running(self, call: SampleCall) -> list[PromptOutcome]:
        """The running prompts that a call waits for."""
        return self.outcomes(self.index.groups(State.RUNNING, call.only_step))

    def changed(self, batch: KVBatchMeta) -> list[PromptOutcome]:
        """The prompts of which rows of a sampled batch were replaced or deleted since."""
        changed: dict[str, dict[int, str]] = defaultdict(dict)
        for key, tag in zip(batch.keys, batch.tags, strict=True):
            uid, session_id, number = split_trajectory(key) or (key, 0, 0)
            now = self.index.find(uid).rows.get((session_id, number))
            if now is None:
                changed[uid][session_id] = f"row {key} was deleted"
            elif (attempt_of(now), now.get(STATUS)) != (attempt_of(tag), tag.get(STATUS)):
                changed[uid][session_id] = f"another attempt replaced row {key}"
        outcomes = self.outcomes(map(self.index.find, changed))
        return [outcome.without(changed[outcome.uid]) for outcome in outcomes]

    def is_stale(self, submitted: int | None, step: int) -> bool:
        """Whether groups submitted at that step span more steps than the threshold allows."""
        limit = self._age_limit("drop")
        return limit is not None and submitted is not None and step - submitted + 1 > limit

    def stale(self, step: int) -> Iterator[PromptGroup]:
        """The stale groups that could be sampled otherwise."""
        for state in (State.COMPLETE, State.INCOMPLETE):
            for submitted in self.index.steps(state):
                if self.is_stale(submitted, step):
                    yield from self.index.groups(state, submitted)

    def fresh(self, step: int) -> Iterator[PromptGroup]:
        """The complete groups that are not stale, the oldest first."""
        complete = self.index.groups(State.COMPLETE)
        return (group for group in complete if not self.is_stale(group.step, step))

    def about_to_be_stale(self, step: int) -> bool:
        """Whether to wait for a running prompt that has reached the threshold."""
        limit = self._age_limit("wait")
        return limit is not None and any(
            submitted is not None and step - submitted + 1 >= limit
            for submitted in self.index.steps(State.RUNNING)
        )

    def situation(self, call: SampleCall) -> str:
        """What there is to sample and what is missing, in one line."""
        complete, running, sampled = (
            self.count(state, call.only_step)
            for state in (State.COMPLETE, State.RUNNING, State.SAMPLED)
        )
        every = complete + running + len(self.pending_refills)
        wanted = every if call.batch_size is None else call.batch_size
        facts = [f"{complete} of {wanted} prompts are complete, {running} are running"]
        if self.about_to_be_stale(call.step):
            facts.append("running prompts that are about to be stale come first")
        if self.pending_refills:
            facts.append(f"refills that have not arrived: {_names(self.pending_refills)}")
        if call.dropped:
            facts.append(f"{len(call.dropped)} were incomplete and dropped")
        if sampled:
            facts.append(f"{sampled} were sampled before")
        if orphaned := [group.uid for group in self.index.groups(State.ORPHANED)]:
            facts.append(f"keys without a prompt that has a step: {_names(orphaned)}")
        return "; ".join(facts)

    def _age_limit(self, strategy: str) -> int | None:
        on = self._config.max_off_policy_strategy == strategy and not self._validates
        return self._config.max_off_policy_threshold if on else None


class Partitions:
    """The partitions of a queue by name. Not thread-safe: the buffer locks them."""

    def __init__(self, queue: TrajectoryQueue, config: ReplayConfig) -> None:
        self._queue = queue
        self._config = config
        self._watch = queue.watch()
        self._partitions: dict[str, Partition] = {}

    def __getitem__(self, name: str) -> Partition:
        if name not in self._partitions:
            drops = self._queue.drops_late_writes
            self._partitions[name] = Partition(name, self._config, drops)
        return self._partitions[name]

    def sync(self) -> None:
        """Apply what has changed in the queue."""
        for name, changes in self._watch.poll().items():
            self[name].apply(changes)

    def wait_change(self, timeout: float) -> None:
        """Wait until the queue changes, `timeout` seconds at most. Needs no lock."""
        self._watch.wait_change(timeout)

    def remove(self, uids: Sequence[str], name: str) -> None:
        """Delete prompts with their rows and markers from the queue."""
        partition = self[name]
        self._queue.delete(partition.index.remove(uids), name)
        # A polling watch must see them deleted before a refill puts the same keys again.
        self.sync()
        partition.pending_refills.difference_update(uids)
        for uid in uids:
            partition.refills.pop(uid, None)


def _names(uids: Iterable[str], most: int = 10) -> str:
    uids = list(uids)
    return ", ".join(uids[:most]) + (f" and {len(uids) - most} more" if len(uids) > most else "")
