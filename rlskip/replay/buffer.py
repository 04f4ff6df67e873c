"""The replay buffer: complete groups for the trainer, or an error that names what is missing."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tensordict import TensorDict

from rlskip.config.replay import read_replay
from rlskip.errors import ConfigError, RlskipError
from rlskip.keys import ROLLOUT_ROOT_KEYS, VAL
from rlskip.queue import KVBatchMeta, TrajectoryQueue
from rlskip.replay.filtering import GroupFilter
from rlskip.replay.incomplete import changed_rows, name_prompts
from rlskip.replay.partitions import Partitions
from rlskip.replay.readiness import PromptGroup, PromptOutcome, State
from rlskip.replay.sampling import SampleCall

log = logging.getLogger(__name__)

#: Called with the partition and the prompts just evicted. It submits their replacements and
#: returns the new uids, one per prompt and in order, or None if the prompts run again under their
#: own uids. The buffer is locked during the call, so it must not wait for a thread that uses it.
Refill = Callable[[str, list[PromptOutcome]], "Sequence[str] | None"]

# Another thread that uses the same buffer may poll the change that this thread waits for.
_LONGEST_WAIT_S = 1.0


class ReplayBuffer:
    """Samples complete groups from a trajectory queue.

    The buffer keeps the queue's tags, never its rows. It is thread-safe: while one thread waits
    in :meth:`sample`, others may count and clear.

    Parameters
    ----------
    queue
        The queue to which sessions write their rows and markers.
    config
        A full DictConfig, a mapping with an entry `replay`, a :class:`ReplayConfig`, or None
        for the defaults.
    refill
        Replaces evicted prompts: those that ``on_incomplete: refill`` evicts, stale and rejected
        ones.
    group_filter
        Rejects complete training groups; `refill` replaces them.
    on_evict
        Called before :meth:`sample` deletes groups that it does not return, with their rows as
        :meth:`sample` would return them, failed ones included. The buffer is locked meanwhile.

    Raises
    ------
    ConfigError
        The config is invalid; the error names every problem.
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
        self.config = read_replay(config)
        needs_refill = self.config.on_incomplete == "refill" or group_filter is not None
        if needs_refill and refill is None:
            raise ConfigError(
                "refill needs a callback that submits prompts",
                "replay.on_incomplete" if group_filter is None else "group_filter",
                "pass it as ReplayBuffer(..., refill=...)",
            )
        #: The groups that the filter rejected in the last call, counted by the metric's value.
        self.rejected: Counter[float] = Counter()
        self._queue = queue
        self._partitions = Partitions(queue, self.config)
        self._refill = refill
        self._filter = group_filter
        self._on_evict = on_evict
        self._lock = threading.RLock()

    def sample(
        self, step: int, partition: str, batch_size: int | None = None
    ) -> tuple[KVBatchMeta, dict[str, float]]:
        """Wait for complete groups and sample them; no group is sampled twice.

        Parameters
        ----------
        step
            The trainer's step.
        partition
            ``train``, ``val``, or any other partition.
        batch_size
            None: all prompts submitted at `step`, once all of them have finished.
            A number: that many prompts of any step, the oldest first; in ``val``, less those
            that were dropped.

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
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        call = SampleCall(step, partition, batch_size, self._filter_of(partition))
        while True:
            with self._lock:
                self._partitions.sync()
                self._evict_stale(call)
                while self._evict_or_replace(call):
                    # A refill may have put prompts that have finished already.
                    self._partitions.sync()
                groups = self._choose(call)
                if groups is not None:
                    self._discard_surplus(groups, call)
                    self.rejected = call.rejected
                    return self._batch_of(groups, call), call.metrics()
                patience = self._check_time(call)
            self._partitions.wait_change(min(patience, _LONGEST_WAIT_S))

    def get(self, batch: KVBatchMeta, fields: Sequence[str] | None = None) -> TensorDict:
        """Return the rows of a sampled batch, as :meth:`rlskip.queue.TrajectoryQueue.get` does.

        Raises
        ------
        IncompleteRolloutError
            Rows were replaced or deleted after they were sampled; see :meth:`check`.
        MissingKeysError
            A row lacks one of `fields`.
        """
        self.check(batch)
        try:
            return self._queue.get(batch.keys, str(batch.partition_id), fields)
        finally:
            self.check(batch)

    def check(self, batch: KVBatchMeta) -> None:
        """Check that the queue still holds the rows of a sampled batch, or of a part of one.

        A worker that writes its rows itself may do so after its attempt was given up. A
        MemoryQueue drops such a write; a shared queue cannot. A reader that does not use
        :meth:`get` calls this before and after it reads.

        Raises
        ------
        IncompleteRolloutError
            Rows were replaced by another attempt, or deleted.
        """
        partition = str(batch.partition_id)
        with self._lock:
            self._partitions.sync()
            changed = self._partitions[partition].changed(batch)
        if changed:
            raise changed_rows(partition, changed)

    def get_sampleable_count(self, step: int, partition: str) -> int:
        """The number of prompts of any step that `sample` could return now; nothing is evicted."""
        with self._lock:
            self._partitions.sync()
            known = self._partitions[partition]
            complete = known.index.steps(State.COMPLETE)
            fresh = {at: n for at, n in complete.items() if not known.is_stale(at, step)}
            count = sum(fresh.values())
            group_filter = self._filter_of(partition)
            if group_filter is not None:
                groups = (group for at in fresh for group in known.index.groups(State.COMPLETE, at))
                count -= len(group_filter.rejected(partition, groups))
            return count

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
            self._partitions.sync()
            self._partitions.remove(list(uids), partition)

    # -- the steps of sample(), in this order --------------------------------------------------

    def _evict_stale(self, call: SampleCall) -> None:
        if call.batch_size is None:
            return
        partition = self._partitions[call.partition]
        outcomes = partition.outcomes(partition.stale(call.step))
        if not outcomes:
            return
        call.stale_spans += [call.step - (outcome.step or 0) + 1 for outcome in outcomes]
        log.warning("%s: evicting stale prompts:%s", call, name_prompts(outcomes))
        self._discard(outcomes, call)
        if self._refill is not None:
            call.to_replace += [(outcome, 0) for outcome in outcomes]

    def _evict_or_replace(self, call: SampleCall) -> bool:
        """Returns whether any group was evicted or replaced."""
        evicted = self._evict_incomplete(call) | self._evict_rejected(call)
        return self._replace_evicted(call) or evicted

    def _evict_incomplete(self, call: SampleCall) -> bool:
        """Apply ``replay.on_incomplete``; returns whether any group was evicted."""
        partition = self._partitions[call.partition]
        outcomes = partition.outcomes(partition.index.groups(State.INCOMPLETE, call.only_step))
        if not outcomes:
            return False
        policy = self.config.on_incomplete
        # A refill submits a training prompt, which must not stand in for one of validation.
        if policy == "drop" or (policy == "refill" and call.partition == VAL):
            call.dropped += outcomes
            log.warning("%s: dropping incomplete prompts:%s", call, name_prompts(outcomes))
            self._discard(outcomes, call)
        elif policy == "refill":
            self._refill_incomplete(outcomes, call)
        else:
            raise call.incomplete(outcomes)
        return True

    def _refill_incomplete(self, outcomes: list[PromptOutcome], call: SampleCall) -> None:
        known = self._partitions[call.partition].refills
        refills = [known.get(outcome.uid, 0) for outcome in outcomes]
        most = self.config.max_refills
        exhausted = [outcome for outcome, n in zip(outcomes, refills, strict=True) if n >= most]
        if exhausted:
            raise call.incomplete(exhausted, f"after {most} refills (replay.max_refills)")
        call.refilled += len(outcomes)
        log.warning("%s: refilling incomplete prompts:%s", call, name_prompts(outcomes))
        self._discard(outcomes, call)
        call.to_replace += [(o, n + 1) for o, n in zip(outcomes, refills, strict=True)]

    def _filter_of(self, partition: str) -> GroupFilter | None:
        return None if partition == VAL else self._filter

    def _evict_rejected(self, call: SampleCall) -> bool:
        """Evict the groups that the filter rejects; returns whether there were any."""
        if call.group_filter is None:
            return False
        partition = self._partitions[call.partition]
        complete = partition.index.groups(State.COMPLETE, call.only_step)
        rejected = call.group_filter.rejected(call.partition, complete)
        if not rejected:
            return False
        call.rejected.update(group.metric for group in rejected)
        outcomes = partition.outcomes(rejected)
        self._discard(outcomes, call)
        call.to_replace += [(outcome, 0) for outcome in outcomes * call.group_filter.refills]
        return True

    def _replace_evicted(self, call: SampleCall) -> bool:
        """Submit replacements, as many as may be; returns whether there were any."""
        now = call.to_replace
        if now and call.group_filter is not None:
            partition = self._partitions[call.partition]
            complete = partition.count(State.COMPLETE, call.only_step)
            enough = complete >= (call.batch_size or 1)
            running = partition.count(State.RUNNING) + len(partition.pending_refills)
            if enough and call.discards_surplus:
                call.to_replace = []
            now = call.to_replace[: call.group_filter.room(running, call.submitted)]
            if call.to_replace and not (now or running or enough):
                raise call.rejected_too_many(complete)
        if not now:
            return False
        call.to_replace = call.to_replace[len(now) :]
        call.submitted += len(now)
        self._replace(now, call)
        return True

    def _discard_surplus(self, groups: list[PromptGroup], call: SampleCall) -> None:
        if not call.discards_surplus:
            return
        partition = self._partitions[call.partition]
        taken = {group.uid for group in groups}
        complete = partition.index.groups(State.COMPLETE, call.only_step)
        surplus = [group for group in complete if group.uid not in taken]
        call.surplus = len(surplus)
        self._discard(partition.outcomes(surplus), call)

    def _discard(self, outcomes: Sequence[PromptOutcome], call: SampleCall) -> None:
        uids = [outcome.uid for outcome in outcomes]
        if uids and self._on_evict is not None and call.partition != VAL:
            groups = map(self._partitions[call.partition].index.find, uids)
            rows = {key: tag for group in groups for key, tag in group.all_rows()}
            tags = [dict(tag) for tag in rows.values()]
            roots = {ROLLOUT_ROOT_KEYS: uids}
            self._on_evict(KVBatchMeta(list(rows), tags, call.partition, None, roots))
        self._partitions.remove(uids, call.partition)

    def _replace(self, pairs: list[tuple[PromptOutcome, int]], call: SampleCall) -> None:
        """Replace evicted prompts, each with the number of refills in a row it will have had."""
        assert self._refill is not None
        evicted = [outcome for outcome, _ in pairs]
        uids = self._refill(call.partition, evicted)
        uids = [outcome.uid for outcome in evicted] if uids is None else list(uids)
        if len(uids) != len(pairs):
            raise RlskipError(
                f"the refill callback returned {len(uids)} uids for {len(pairs)} prompts",
                remedy="return one uid per prompt, in order, or None",
            )
        partition = self._partitions[call.partition]
        partition.pending_refills.update(uids)
        partition.refills.update((uid, n) for uid, (_, n) in zip(uids, pairs, strict=True))

    def _choose(self, call: SampleCall) -> list[PromptGroup] | None:
        """The groups to return, or None to go on waiting."""
        partition = self._partitions[call.partition]
        if call.batch_size is None:
            if partition.count(State.RUNNING, call.step) or partition.pending_refills:
                return None
            groups = list(partition.index.groups(State.COMPLETE, call.step))
            if not groups and call.dropped:
                raise call.incomplete(call.dropped, "(every prompt was dropped)")
            return groups or None
        # All that was submitted, if its surplus is discarded.
        waits = call.discards_surplus and (
            partition.count(State.RUNNING) or partition.pending_refills
        )
        if waits or partition.about_to_be_stale(call.step):
            return None
        # Nothing replaces a dropped prompt of a validation batch, so nothing is waited for.
        dropped = len(call.dropped) if call.partition == VAL else 0
        if dropped >= call.batch_size:
            raise call.incomplete(call.dropped, "(every prompt was dropped)")
        groups = list(itertools.islice(partition.fresh(call.step), call.batch_size - dropped))
        return groups if len(groups) + dropped == call.batch_size else None

    def _batch_of(self, groups: list[PromptGroup], call: SampleCall) -> KVBatchMeta:
        # Two lists, not a list of pairs: a million tuples slow down the garbage collector.
        keys: list[str] = []
        tags: list[Any] = []  # KVBatchMeta copies them
        for group in groups:
            for key, tag in group.successful_rows():
                keys.append(key)
                tags.append(tag)
        # Under any other policy, no session is missing.
        viable = groups if self.config.on_incomplete == "min_viable" else []
        partition = self._partitions[call.partition]
        outcomes = partition.outcomes(viable)
        short = [outcome for outcome in outcomes if not outcome.complete]
        if short:
            call.short = len(short)
            log.warning(
                "%s: sampling viable groups with missing sessions:%s", call, name_prompts(short)
            )
        partition.index.mark_sampled(groups)
        return KVBatchMeta(
            keys=keys,
            tags=tags,
            partition_id=call.partition,
            extra_info={ROLLOUT_ROOT_KEYS: [group.uid for group in groups]},
        )

    def _check_time(self, call: SampleCall) -> float:
        """Log a progress line when one is due; returns the seconds until the next.

        Raises ReplayTimeoutError when ``replay.timeout_s`` has passed.
        """
        partition = self._partitions[call.partition]
        now = time.monotonic()
        timeout_at = call.started + self.config.timeout_s
        if now >= timeout_at:
            raise call.timed_out(partition.running(call), partition.situation(call))
        if now >= call.logged + self.config.progress_interval_s:
            call.logged = now
            text = "%s: waiting for %.0f of %.0f s; %s%s"
            situation = partition.situation(call), name_prompts(partition.running(call))
            log.info(text, call, now - call.started, self.config.timeout_s, *situation)
        return min(timeout_at, call.logged + self.config.progress_interval_s) - now
