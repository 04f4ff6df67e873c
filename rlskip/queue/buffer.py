"""The replay buffer: complete groups for the trainer, or an error that names what is missing."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tensordict import TensorDict

from rlskip.batch.prompts import named
from rlskip.config.nodes import read_node
from rlskip.config.other_nodes import DispatchConfig, ReplayConfig
from rlskip.errors import ConfigError, RlskipError
from rlskip.keys import ROLLOUT_ROOT_KEYS, integer
from rlskip.queue.partition import QueuedPartition
from rlskip.queue.protocol import KVBatchMeta, MissingKeysError, Row, TrajectoryQueue
from rlskip.queue.readiness import PromptGroup, PromptOutcome, State
from rlskip.queue.rows import to_rows
from rlskip.queue.sampling import Eviction, GroupFilter, SampleCall

#: Called with the partition and the prompts just evicted. It submits their replacements and
#: returns the new uids, one per prompt and in order, or None if the prompts run again under their
#: own uids. If it raises, or returns another number of uids, the prompts are in the queue again as
#: they were. The buffer is locked during the call, so it must not wait for a thread that uses it.
Refill = Callable[[str, list[PromptOutcome]], "Sequence[str] | None"]

# Another thread that uses the same buffer may poll the change that this thread waits for.
_LONGEST_WAIT_S = 1.0


class ReplayBuffer:
    """Samples complete groups from a trajectory queue, of which it keeps the tags.

    While one thread waits in :meth:`sample`, others may count and clear. A queue has one buffer:
    once another is made for it, this one samples nothing more.

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
        Called before :meth:`sample` deletes groups that it does not return, with all their rows.
        The buffer is locked meanwhile.
    clock
        Returns the seconds on which the deadlines of :meth:`sample` are.
    """

    def __init__(
        self,
        queue: TrajectoryQueue,
        config: Any = None,
        *,
        refill: Refill | None = None,
        group_filter: GroupFilter | None = None,
        on_evict: Callable[[KVBatchMeta], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
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
        #: The groups that the filter rejected in the last call, counted by the metric's value.
        self.rejected: Counter[float] = Counter()
        self._queue = queue
        self._watch = queue.watch()
        self._partitions: dict[str, QueuedPartition] = {}
        self._refill = refill
        self._filter = group_filter
        self._on_evict = on_evict
        self._clock = clock
        # Held while tags are read or groups change, and never while a call waits.
        self._lock = threading.RLock()
        queue.buffer = self  # what this one samples, an earlier one has not marked

    def sample(
        self,
        step: int,
        partition: str,
        batch_size: int | None = None,
        uids: set[str] | None = None,
    ) -> tuple[KVBatchMeta, dict[str, float]]:
        """Wait for complete groups and sample them; no group is sampled twice.

        Parameters
        ----------
        batch_size
            None: all prompts submitted at `step`, once all of them have finished.
            A number: that many prompts of any step, the oldest first; in ``val``, less those
            that were dropped.
        uids
            Sample these prompts only; without a batch size, wait for all of them. The set stays
            the one to ask for: an evicted prompt leaves it, and one that replaces it is added.

        Returns
        -------
        batch : KVBatchMeta
            The rows of the successful sessions, group by group, each by session and index.
            ``extra_info["rollout_root_keys"]`` holds the prompts' keys.
        metrics : dict
            The prompts that this call evicted, refilled, and sampled with missing sessions.

        Raises
        ------
        IncompleteRolloutError
            A finished group is incomplete, and ``replay.on_incomplete`` does not accept it.
        ReplayTimeoutError
            ``replay.timeout_s`` has passed; the error names the missing prompts and sessions.
        RlskipError
            Another buffer was made for the queue.
        """
        if self._queue.buffer is not self:
            raise RlskipError(
                "another ReplayBuffer was made for this queue, and two would sample its groups "
                "twice",
                remedy="use that one, or a queue for each",
            )
        if (number := integer(step)) is None:  # no prompt would ever be of this step
            raise ValueError(f"step must be a whole number, got {step!r}")
        if uids is not None:
            if not isinstance(uids, set) or not uids:
                raise ValueError(
                    f"uids must be a set of prompts, or None for all, got {uids!r:.80}"
                )
            names = named(uids)
            uids.clear()  # the caller's set, to which replacements are added
            uids.update(names)
        with self._lock:
            known = self._partition(partition)
        call = SampleCall(
            self.config,
            known,
            number,
            batch_size,
            self._clock(),
            uids=uids,
            group_filter=self._filter,
            replaces_stale=self._refill is not None,
        )
        while True:
            with self._lock:
                self._sync()
                if evicted := call.decide():
                    # Replacements may have finished already, and be evicted in turn. The time is
                    # checked after they are there: no evicted prompt is left without one.
                    self._evict(evicted, call, known)
                elif (groups := call.choose()) is not None:
                    return self._take(groups, call, known), call.metrics()
                patience = call.check_time(self._clock())
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
            known = self._partition(partition)
            fresh = [g for g in known.groups(State.COMPLETE) if not known.is_stale(g.step, step)]
            if self._filter is None or known.validates:
                return len(fresh)
            return len(fresh) - len(self._filter.rejected(partition, fresh))

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
        with self._lock:
            self._sync()
            known = self._partition(partition)
            names = named(uids)
            self._delete([group for uid in names if (group := known.find(uid))], known)
            for uid in names:
                known.refills.pop(uid, None)  # one that has not arrived is not awaited either

    def _partition(self, name: str) -> QueuedPartition:
        if name not in self._partitions:
            self._partitions[name] = QueuedPartition(name, self.config)
        return self._partitions[name]

    def _sync(self) -> None:
        """Apply what has changed in the queue."""
        for name, changes in self._watch.poll().items():
            self._partition(name).apply(changes)

    def _delete(self, groups: Sequence[PromptGroup], known: QueuedPartition) -> None:
        # In this order: if the queue raises, the keys are still known, and can be deleted later.
        self._queue.delete([key for group in groups for key in group.by_key()], known.name)
        known.remove(group.uid for group in groups)
        # A polling watch must see them deleted before a refill puts the same keys again.
        self._sync()

    # -- the steps of sample(), in this order --------------------------------------------------

    def _evict(self, found: Eviction, call: SampleCall, known: QueuedPartition) -> None:
        """Evict and replace, all or nothing."""
        groups = found.groups
        outcomes = [outcome for outcome, _ in found.replaced]
        self._tell(groups, known)
        tags = {key: tag for group in groups for key, tag in group.by_key().items()}
        rows: dict[str, list[Row]] = {}
        for key in tags if outcomes else ():
            with contextlib.suppress(MissingKeysError):  # it holds a tag alone
                rows[key] = [*to_rows(self._queue.get([key], known.name))]
        there = {*known.refills, *(group.uid for group in known.groups(*State))}
        # In this order: a prompt may run again under its own uid, so its keys must be gone before
        # the callback submits it. If the callback fails, they are put again.
        self._delete(groups, known)
        try:
            uids = self._submit(outcomes, known.name, there) if outcomes else []
        except BaseException:
            for key, tag in tags.items():
                self._queue.put([key], known.name, rows.get(key), [tag])
            self._sync()
            for group in groups:  # it is what it was
                known.file(group)
            raise
        for group in groups:
            known.refills.pop(group.uid, None)
        for uid, (_, count) in zip(uids, found.replaced, strict=True):
            known.refills[uid] = call.only_step, count
        call.evicted(found, uids)

    def _tell(self, groups: Sequence[PromptGroup], known: QueuedPartition) -> None:
        """Call `on_evict`, once for each group."""
        new = [group for group in groups if not group.told]
        if new and self._on_evict is not None and not known.validates:
            self._on_evict(_batch(new, known.name, failed=True))
            for group in new:
                group.told = True

    def _submit(self, evicted: list[PromptOutcome], name: str, there: set[str]) -> list[str]:
        """Have the callback submit replacements; returns their uids."""
        assert self._refill is not None
        found = self._refill(name, evicted)
        if found is None:
            return [outcome.uid for outcome in evicted]
        uids = named(found)
        # A prompt that was there before replaces none: the step would be short of one.
        new = {*uids} - there
        if not len(uids) == len(new) == len(evicted):
            raise RlskipError(
                f"the refill callback returned {len(new)} new uids for {len(evicted)} prompts, "
                f"which stay in the queue: {found!r:.200}",
                remedy="return one uid of a new prompt for each, in order, or None",
            )
        return uids

    def _take(
        self, groups: list[PromptGroup], call: SampleCall, known: QueuedPartition
    ) -> KVBatchMeta:
        """The batch of these groups, which are sampled from now on."""
        self.rejected = Counter(group.metric for group in call.gone.rejected)
        batch = _batch(groups, known.name)
        for group in groups:  # it stays in the partition, and is never sampled again
            group.sampled = True
            known.refills.pop(group.uid, None)
            known.file(group)
        return batch


def _batch(groups: Sequence[PromptGroup], partition: str, *, failed: bool = False) -> KVBatchMeta:
    """The rows of these groups, those of `failed` sessions included or not, as a batch."""
    # Two lists, not a list of pairs: a million tuples slow down the garbage collector.
    found, tags = list[str](), list[Any]()  # KVBatchMeta copies the tags
    for group in groups:
        for key, tag in group.rows(failed=failed):
            found.append(key)
            tags.append(tag)
    roots = {ROLLOUT_ROOT_KEYS: [group.uid for group in groups]}
    return KVBatchMeta(found, tags, partition, extra_info=roots)
