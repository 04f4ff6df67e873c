"""What a replay buffer knows of its queue: the groups of each partition, and how old they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from rlskip.config.replay import ReplayConfig
from rlskip.keys import VAL
from rlskip.queue import TrajectoryQueue
from rlskip.replay.group_index import PartitionIndex
from rlskip.replay.readiness import PromptGroup, PromptOutcome, State, state_of
from rlskip.replay.sampling import SampleCall


class Partitions:
    """The part of a buffer that follows its queue. Not thread-safe: the buffer locks it."""

    def __init__(self, queue: TrajectoryQueue, config: ReplayConfig) -> None:
        self.config = config
        self._queue = queue
        self._watch = queue.watch()
        self._partitions: dict[str, PartitionIndex] = {}
        # partition -> uids that a refill announced and the queue does not hold yet
        self._owed: dict[str, set[str]] = defaultdict(set)
        # (partition, uid) -> how many prompts it replaces, each in turn a replacement
        self._refills: dict[tuple[str, str], int] = {}

    def _sync(self) -> None:
        for partition, changes in self._watch.poll().items():
            index = self._index(partition)
            index.apply(changes)
            owed = self._owed[partition]
            owed.difference_update([uid for uid in owed if index.has_prompt(uid)])

    def _index(self, partition: str) -> PartitionIndex:
        index = self._partitions.get(partition)
        if index is None:
            expected = self._expected(partition)
            k = self.config.min_viable if self.config.on_incomplete == "min_viable" else None
            index = PartitionIndex(
                lambda group: state_of(group, expected, k), self._queue.drops_late_writes
            )
            self._partitions[partition] = index
        return index

    def _expected(self, partition: str) -> int | None:
        """Sessions to expect of a prompt whose tag does not say."""
        return self.config.val_n if partition == VAL else self.config.n

    def _outcomes(self, groups: Iterable[PromptGroup], partition: str) -> list[PromptOutcome]:
        expected = self._expected(partition)
        return [PromptOutcome.of(group, expected) for group in groups]

    def _remove(self, uids: Sequence[str], partition: str) -> None:
        self._queue.delete(self._index(partition).remove(uids), partition)
        # A polling watch must see them deleted before a refill puts the same keys again.
        self._sync()
        self._owed[partition].difference_update(uids)
        for uid in uids:
            self._refills.pop((partition, uid), None)

    def _is_stale(self, submitted: int | None, step: int, partition: str) -> bool:
        """Whether groups submitted at that step span more steps than the threshold allows."""
        limit = self._age_limit("drop", partition)
        return limit is not None and submitted is not None and step - submitted + 1 > limit

    def _about_to_be_stale(self, call: SampleCall) -> bool:
        """Whether to wait for a running prompt that has reached the threshold."""
        limit = self._age_limit("wait", call.partition)
        running = self._index(call.partition).steps(State.RUNNING)
        return limit is not None and any(
            step is not None and call.step - step + 1 >= limit for step in running
        )

    def _age_limit(self, strategy: str, partition: str) -> int | None:
        on = self.config.max_off_policy_strategy == strategy and partition != VAL
        return self.config.max_off_policy_threshold if on else None

    def _missing(self, call: SampleCall) -> list[PromptOutcome]:
        """The running prompts that this call waits for."""
        index = self._index(call.partition)
        return self._outcomes(index.groups(State.RUNNING, call.only_step), call.partition)

    def _situation(self, call: SampleCall) -> str:
        """What there is to sample and what is missing, in one line."""
        index, only = self._index(call.partition), call.only_step

        def count(state: State) -> int:
            steps = index.steps(state)
            return sum(steps.values()) if only is None else steps.get(only, 0)

        complete, running = count(State.COMPLETE), count(State.RUNNING)
        owed = self._owed[call.partition]
        wanted = complete + running + len(owed) if call.batch_size is None else call.batch_size
        facts = [f"{complete} of {wanted} prompts are complete, {running} are running"]
        if self._about_to_be_stale(call):
            facts.append("running prompts that are about to be stale come first")
        if owed:
            facts.append(f"refills that have not arrived: {_names(owed)}")
        if call.dropped:
            facts.append(f"{len(call.dropped)} were incomplete and dropped")
        if sampled := count(State.SAMPLED):
            facts.append(f"{sampled} were sampled before")
        if orphaned := [group.uid for group in index.groups(State.ORPHANED)]:
            facts.append(f"keys without a prompt that has a step: {_names(orphaned)}")
        return "; ".join(facts)


def _names(uids: Iterable[str], most: int = 10) -> str:
    uids = list(uids)
    return ", ".join(uids[:most]) + (f" and {len(uids) - most} more" if len(uids) > most else "")
