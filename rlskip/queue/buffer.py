"""The replay buffer: complete groups for the trainer, or an error that names what is missing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any

from tensordict import TensorDict

from rlskip.config.nodes import read_node
from rlskip.config.other_nodes import DispatchConfig, ReplayConfig
from rlskip.errors import ConfigError, RlskipError
from rlskip.keys import ROLLOUT_ROOT_KEYS, integer
from rlskip.queue.protocol import KVBatchMeta, TrajectoryQueue
from rlskip.queue.readiness import Partition, PromptGroup, PromptOutcome
from rlskip.queue.sampling import Eviction, GroupFilter, SampleCall

#: Called with the partition and the prompts that are about to be evicted. It submits a new prompt
#: for each, and returns their uids once they are in the queue. If it raises, or returns other uids,
#: nothing is evicted. The buffer is locked during the call, so it must not wait for a thread that
#: uses it.
Refill = Callable[[str, list[PromptOutcome]], Sequence[str]]

# Another thread that uses the same buffer may poll the change that this thread waits for.
_LONGEST_WAIT_S = 1.0


class ReplayBuffer:
    """Samples complete groups from a trajectory queue, of which it keeps the tags.

    While one thread waits in :meth:`sample`, others may count and clear. A queue has one buffer:
    once another is made for it, this one samples, counts and deletes nothing more.

    Parameters
    ----------
    config
        A full DictConfig, a mapping with an entry `replay`, a :class:`ReplayConfig`, or None
        for the defaults. ``dispatch.fill_missing`` of a full one applies to :meth:`get`.
    refill
        Replaces prompts that ``on_incomplete: refill`` evicts, stale and rejected ones.
    group_filter
        Rejects complete training groups; `refill` replaces them.
    on_evict
        Called before :meth:`sample` replaces and deletes groups that it does not return, with all
        their rows; once for each group. The buffer is locked meanwhile.
    """

    def __init__(
        self,
        queue: TrajectoryQueue,
        config: Any = None,
        *,
        refill: Refill | None = None,
        group_filter: GroupFilter | None = None,
        on_evict: Callable[[KVBatchMeta], object] | None = None,
    ) -> None:
        self.config = read_node(ReplayConfig, config)
        full = None if isinstance(config, ReplayConfig) else config
        self._fill_missing = read_node(DispatchConfig, full).fill_missing
        if refill is None and (self.config.on_incomplete == "refill" or group_filter is not None):
            raise ConfigError(
                "refill needs a callback that submits prompts",
                "replay.on_incomplete" if group_filter is None else "group_filter",
                "pass it as ReplayBuffer(..., refill=...)",
            )
        self._queue = queue
        queue.buffer = self  # an earlier one would sample the same groups, and take the changes
        self._watch = queue.watch()
        self._partitions: dict[str, Partition] = {}
        self._refill = refill
        self._filter = group_filter
        self._on_evict = on_evict
        # Held while tags are read or groups change, and never while a call waits.
        self._lock = threading.RLock()

    def sample(
        self, step: int, partition: str, batch_size: int | None = None
    ) -> tuple[KVBatchMeta, dict[str, float]]:
        """Wait for complete groups and sample them; no group is sampled twice.

        Without a `batch_size` these are all prompts submitted at `step`, once all of them have
        finished; with one, that many prompts of any step, the oldest first; in ``val``, less those
        that were dropped.

        Returns a :class:`KVBatchMeta` of the rows of the successful sessions, group by group, each
        by session and index, with the prompts' keys as ``extra_info["rollout_root_keys"]``; and as
        metrics, how many prompts this call evicted, refilled, and sampled with missing sessions.
        Raises :class:`IncompleteRolloutError`, or :class:`ReplayTimeoutError`.
        """
        with self._lock:
            call = self._call(step, partition, batch_size)
        while True:
            with self._lock:
                self._sync()
                if evicted := call.decide():
                    self._evict(evicted, call)  # replacements may have finished already
                elif groups := call.choose():
                    for group in groups:  # it stays in the partition, and is never sampled again
                        group.sampled = True
                        call.partition.file(group)
                    return _batch(groups, partition), call.metrics()
                patience = call.check_time(monotonic())
            if not evicted:
                self._watch.wait_change(min(patience, _LONGEST_WAIT_S))

    def get(self, batch: KVBatchMeta, fields: Sequence[str] | None = None) -> TensorDict:
        """Return the rows of a sampled batch, as :meth:`rlskip.queue.TrajectoryQueue.get` does."""
        partition = str(batch.partition_id)
        return self._queue.get(batch.keys, partition, fields, fill_missing=self._fill_missing)

    def get_sampleable_count(self, step: int, partition: str) -> int:
        """The number of prompts of any step that `sample` could return now; nothing is evicted."""
        with self._lock:
            self._sync()
            return len(self._call(step, partition, 1).judged()[0])

    def clear(self, batch: KVBatchMeta) -> None:
        """Delete a sampled batch from the queue: its rows, its prompts and their markers.

        Pass the whole batch: a part of it still names the root keys of all its prompts.
        """
        roots = (batch.extra_info or {}).get(ROLLOUT_ROOT_KEYS)
        if roots is None or batch.partition_id is None:
            raise RlskipError(
                "this batch does not name its prompts",
                f"extra_info[{ROLLOUT_ROOT_KEYS!r}]",
                "pass the batch that sample() returned, or call evict(uids, partition)",
            )
        self.evict(roots, batch.partition_id)

    def evict(self, uids: Iterable[str], partition: str) -> None:
        """Delete prompts in any state from the queue: roots, rows and markers."""
        uids = [uids] if isinstance(uids, str) else uids
        with self._lock:
            self._sync()
            known = self._partition(partition)
            self._delete([group for uid in uids if (group := known.find(uid))], known)

    # -- within --------------------------------------------------------------------------------

    def _call(self, step: int, name: str, size: int | None) -> SampleCall:
        if (number := integer(step)) is None:  # no prompt would ever be of this step
            raise ConfigError(f"it must be a whole number, got {step!r}", "step")
        known, refills = self._partition(name), self._refill is not None
        return SampleCall(known, number, size, monotonic(), self._filter, refills)

    def _partition(self, name: str) -> Partition:
        if name not in self._partitions:
            self._partitions[name] = Partition(name, self.config)
        return self._partitions[name]

    def _sync(self) -> None:
        """Apply what has changed in the queue, of which only its last buffer is told."""
        if self._queue.buffer is not self:
            raise RlskipError(
                "another ReplayBuffer was made for this queue, and two would sample its groups "
                "twice",
                remedy="use that one, or a queue for each",
            )
        for name, changes in self._watch.poll().items():
            self._partition(name).apply(changes)

    def _delete(self, groups: Sequence[PromptGroup], known: Partition) -> None:
        # In this order: if the queue raises, the keys are still known, and can be deleted later.
        entries = (entry for group in groups for entry in group.entries.values())
        self._queue.delete([key for key, _ in entries], known.name)
        known.remove(group.uid for group in groups)
        # A watch that polls must see them deleted before somebody puts the same keys again.
        self._sync()

    def _evict(self, found: Eviction, call: SampleCall) -> None:
        """Tell of, replace and delete groups: what raises leaves them to another call."""
        groups, known = [group for some in found.values() for group in some], call.partition
        # In this order: if `on_evict` raises, no replacement is in the queue, and the step is what
        # it was.
        new = [group for group in groups if not group.told]
        if new and self._on_evict is not None and not known.validates:
            self._on_evict(_batch(new, known.name, failed=True))
            for group in new:
                group.told = True
        if self._refill and (prompts := [group.outcome() for group in call.replaced(found)]):
            self._replace(self._refill, prompts, call)
        self._delete(groups, known)
        call.evicted(found)

    def _replace(self, refill: Refill, prompts: list[PromptOutcome], call: SampleCall) -> None:
        """Have the callback submit as many new prompts, which the call samples."""
        before = call.prompts()
        uids = [*refill(call.partition.name, prompts)]
        self._sync()
        new = {*uids} & (call.prompts() - before)
        if not len(prompts) == len(uids) == len(new):  # else the step would be short of one
            raise RlskipError(
                f"the refill callback returned {uids!r:.200} for {len(prompts)} prompts, which "
                f"stay in the queue; of these, {len(new)} are new prompts that {call} can sample",
                remedy="submit a new prompt for each, and return their uids",
            )


def _batch(groups: Sequence[PromptGroup], partition: str, *, failed: bool = False) -> KVBatchMeta:
    """The rows of these groups, those of `failed` sessions included or not, as a batch."""
    # Two lists, not a list of pairs: a million tuples slow down the garbage collector.
    found, tags = list[str](), list[dict[str, Any]]()
    for group in groups:
        for key, tag in group.rows(failed=failed):
            found.append(key)
            tags.append(dict(tag))
    roots = {ROLLOUT_ROOT_KEYS: [group.uid for group in groups]}
    return KVBatchMeta(found, tags, partition, extra_info=roots)
