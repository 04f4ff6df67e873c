"""The replay buffer: complete groups for the trainer, or an error that names what is missing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any

from tensordict import TensorDict

from rlskip.config.nodes import read_node
from rlskip.config.other_nodes import DispatchConfig, ReplayConfig
from rlskip.errors import ConfigError, RlskipError
from rlskip.keys import ROLLOUT_ROOT_KEYS, integer
from rlskip.queue.partition import Partition
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
        self._watch = queue.watch()
        self._partitions: dict[str, Partition] = {}
        self._refill = refill
        self._filter = group_filter
        self._on_evict = on_evict
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
        """
        if self._queue.buffer is not self:
            raise RlskipError(
                "another ReplayBuffer was made for this queue, and two would sample its groups "
                "twice",
                remedy="use that one, or a queue for each",
            )
        if not (uids is None or (isinstance(uids, set) and uids and _are_texts(uids))):
            raise ValueError(f"uids must be a set of prompts, or None for all, got {uids!r:.80}")
        with self._lock:
            call = self._call(step, partition, batch_size, uids)
        while True:
            with self._lock:
                self._sync()
                if evicted := call.decide():
                    # Replacements may have finished already, and be evicted in turn. The time is
                    # checked after they are there: no evicted prompt is left without one.
                    self._evict(evicted, call)
                elif groups := call.choose():
                    for group in groups:  # it stays in the partition, and is never sampled again
                        group.sampled = True
                        call.partition.refills.pop(group.uid, None)
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
            call = self._call(step, partition, 1)
            complete = call.groups(State.COMPLETE)
            stale = call.stale(complete)
            fresh = [group for group in complete if group not in stale]
            rejected = call.group_filter.rejected(partition, fresh) if call.group_filter else ()
            return len(fresh) - len(rejected)

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
            known, names = self._partition(partition), [*uids]
            self._delete([group for uid in names if (group := known.find(uid))], known)
            for uid in names:
                known.refills.pop(uid, None)  # one that has not arrived is not awaited either

    # -- within --------------------------------------------------------------------------------

    def _call(self, step: int, name: str, size: int | None, uids: Any = None) -> SampleCall:
        if (number := integer(step)) is None:  # no prompt would ever be of this step
            raise ValueError(f"step must be a whole number, got {step!r}")
        now, known, replaces = monotonic(), self._partition(name), self._refill is not None
        return SampleCall(self.config, known, number, size, now, uids, self._filter, replaces)

    def _partition(self, name: str) -> Partition:
        if name not in self._partitions:
            self._partitions[name] = Partition(name, self.config)
        return self._partitions[name]

    def _sync(self) -> None:
        """Apply what has changed in the queue."""
        for name, changes in self._watch.poll().items():
            self._partition(name).apply(changes)

    def _delete(self, groups: Sequence[PromptGroup], known: Partition) -> None:
        # In this order: if the queue raises, the keys are still known, and can be deleted later.
        self._queue.delete([key for group in groups for key in group.by_key()], known.name)
        known.remove(group.uid for group in groups)
        # A polling watch must see them deleted before a refill puts the same keys again.
        self._sync()

    def _evict(self, found: Eviction, call: SampleCall) -> None:
        """Evict and replace, all or nothing."""
        groups, replaced, known = found.groups, call.replaced(found), call.partition
        new = [group for group in groups if not group.told]
        if new and self._on_evict is not None and not known.validates:
            self._on_evict(_batch(new, known.name, failed=True))
            for group in new:
                group.told = True
        tags = {key: tag for group in groups for key, tag in group.by_key().items()}
        rows: dict[str, list[Row]] = {}
        for key in tags if replaced else ():
            with contextlib.suppress(MissingKeysError):  # it holds a tag alone
                rows[key] = [*to_rows(self._queue.get([key], known.name))]
        there = {*known.refills, *(group.uid for group in known.groups(*State))}
        # In this order: a prompt may run again under its own uid, so its keys must be gone before
        # the callback submits it. If the callback fails, they are put again.
        self._delete(groups, known)
        try:
            uids = self._submit([prompt for prompt, _ in replaced], known.name, there)
        except BaseException:
            for key, tag in tags.items():
                self._queue.put([key], known.name, rows.get(key), [tag])
            self._sync()
            for group in groups:  # it is what it was
                known.file(group)
            raise
        for group in groups:
            known.refills.pop(group.uid, None)
        for uid, (_, count) in zip(uids, replaced, strict=True):
            known.refills[uid] = call.only_step, count
        call.evicted(found, uids)

    def _submit(self, evicted: list[PromptOutcome], name: str, there: set[str]) -> list[str]:
        """Have the callback submit replacements; returns their uids."""
        found = self._refill(name, evicted) if self._refill is not None and evicted else None
        if found is None:
            return [outcome.uid for outcome in evicted]
        uids = [*found]
        # A prompt that was there before replaces none: the step would be short of one.
        new = {*uids} - there
        if not (len(uids) == len(new) == len(evicted) and _are_texts(uids)):
            raise RlskipError(
                f"the refill callback returned {len(new)} new uids for {len(evicted)} prompts, "
                f"which stay in the queue: {found!r:.200}",
                remedy="return one uid of a new prompt for each, in order, or None",
            )
        return uids


def _are_texts(uids: Iterable[Any]) -> bool:
    return all(isinstance(uid, str) for uid in uids)


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
