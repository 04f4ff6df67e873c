"""The replay buffer: complete groups for the trainer, or an error that names what is missing."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tensordict import TensorDict

from rlskip.config.replay import read_replay
from rlskip.errors import ConfigError, RlskipError
from rlskip.keys import ROLLOUT_ROOT_KEYS, STATUS, VAL, attempt_of, split_trajectory
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


class ReplayBuffer(Partitions):
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
        super().__init__(queue, read_replay(config))
        needs_refill = self.config.on_incomplete == "refill" or group_filter is not None
        if needs_refill and refill is None:
            raise ConfigError(
                "refill needs a callback that submits prompts",
                "replay.on_incomplete" if group_filter is None else "group_filter",
                "pass it as ReplayBuffer(..., refill=...)",
            )
        #: The groups that the filter rejected in the last call, counted by the metric's value.
        self.rejected: Counter[float] = Counter()
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
        call = SampleCall(step, partition, batch_size)
        while True:
            with self._lock:
                self._sync()
                self._evict_stale(call)
                while self._evict_or_replace(call):
                    self._sync()  # a refill may have put prompts that have finished already
                groups = self._choose(call)
                if groups is not None:
                    self._discard_surplus(groups, call)
                    self.rejected = call.rejected
                    return self._batch_of(groups, call), call.metrics()
                patience = self._check_time(call)
            self._watch.wait_change(min(patience, _LONGEST_WAIT_S))

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
        """Check that the queue still holds the rows of a sampled batch, or of a chunk of one.

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
            self._sync()
            index = self._index(partition)
            changed: dict[str, dict[int, str]] = defaultdict(dict)
            for key, tag in zip(batch.keys, batch.tags, strict=True):
                uid, session_id, number = split_trajectory(key) or (key, 0, 0)
                now = index.find(uid).rows.get((session_id, number))
                if now is None:
                    changed[uid][session_id] = f"row {key} was deleted"
                elif (attempt_of(now), now.get(STATUS)) != (attempt_of(tag), tag.get(STATUS)):
                    changed[uid][session_id] = f"another attempt replaced row {key}"
            outcomes = self._outcomes(map(index.find, changed), partition)
        if changed:
            raise changed_rows(
                partition, [outcome.without(changed[outcome.uid]) for outcome in outcomes]
            )

    def get_sampleable_count(self, step: int, partition: str) -> int:
        """The number of prompts of any step that `sample` could return now; nothing is evicted."""
        with self._lock:
            self._sync()
            index = self._index(partition)
            fresh = {
                submitted: count
                for submitted, count in index.steps(State.COMPLETE).items()
                if not self._is_stale(submitted, step, partition)
            }
            groups = (g for submitted in fresh for g in index.groups(State.COMPLETE, submitted))
            return sum(fresh.values()) - len(self._rejected(partition, groups))

    def clear(self, batch: KVBatchMeta) -> None:
        """Delete a sampled batch from the queue: its rows, its prompts and their markers.

        Pass the whole batch: a chunk still names the root keys of all its prompts.
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
            self._remove(list(uids), partition)

    # -- the steps of sample(), in this order --------------------------------------------------
    def _evict_stale(self, call: SampleCall) -> None:
        if call.batch_size is None:
            return
        index = self._index(call.partition)
        stale = [
            group
            for state in (State.COMPLETE, State.INCOMPLETE)
            for step in index.steps(state)
            if self._is_stale(step, call.step, call.partition)
            for group in index.groups(state, step)
        ]
        if not stale:
            return
        outcomes = self._outcomes(stale, call.partition)
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
        index = self._index(call.partition)
        outcomes = self._outcomes(index.groups(State.INCOMPLETE, call.only_step), call.partition)
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
        refills = [self._refills.get((call.partition, outcome.uid), 0) for outcome in outcomes]
        most = self.config.max_refills
        exhausted = [outcome for outcome, n in zip(outcomes, refills, strict=True) if n >= most]
        if exhausted:
            raise call.incomplete(exhausted, f"after {most} refills (replay.max_refills)")
        call.refilled += len(outcomes)
        log.warning("%s: refilling incomplete prompts:%s", call, name_prompts(outcomes))
        self._discard(outcomes, call)
        call.to_replace += [(o, n + 1) for o, n in zip(outcomes, refills, strict=True)]

    def _rejected(self, partition: str, groups: Iterable[PromptGroup]) -> list[PromptGroup]:
        if self._filter is None or partition == VAL:
            return []
        return self._filter.rejected(partition, groups)

    def _evict_rejected(self, call: SampleCall) -> bool:
        """Evict the groups that the filter rejects; returns whether there were any."""
        index = self._index(call.partition)
        rejected = self._rejected(call.partition, index.groups(State.COMPLETE, call.only_step))
        if not rejected:
            return False
        assert self._filter is not None
        call.rejected.update(group.metric for group in rejected)
        outcomes = self._outcomes(rejected, call.partition)
        self._discard(outcomes, call)
        call.to_replace += [(outcome, 0) for outcome in outcomes * self._filter.refills]
        return True

    def _replace_evicted(self, call: SampleCall) -> bool:
        """Submit replacements, as many as may be; returns whether there were any."""
        now = call.to_replace
        if now and self._filter is not None:
            index = self._index(call.partition)
            complete = sum(1 for _ in index.groups(State.COMPLETE, call.only_step))
            enough = complete >= (call.batch_size or 1)
            running = sum(index.steps(State.RUNNING).values()) + len(self._owed[call.partition])
            if enough and self._filter.discards_surplus:
                call.to_replace = []
            now = call.to_replace[: self._filter.room(running, call.submitted)]
            if call.to_replace and not (now or running or enough):
                raise call.rejected_too_many(complete)
        if not now:
            return False
        call.to_replace = call.to_replace[len(now) :]
        call.submitted += len(now)
        self._replace([outcome for outcome, _ in now], [n for _, n in now], call)
        return True

    def _discard_surplus(self, groups: list[PromptGroup], call: SampleCall) -> None:
        if self._filter is None or not self._filter.discards_surplus or call.partition == VAL:
            return
        taken = {group.uid for group in groups}
        complete = self._index(call.partition).groups(State.COMPLETE, call.only_step)
        surplus = [group for group in complete if group.uid not in taken]
        call.surplus = len(surplus)
        self._discard(self._outcomes(surplus, call.partition), call)

    def _discard(self, outcomes: Sequence[PromptOutcome], call: SampleCall) -> None:
        uids = [outcome.uid for outcome in outcomes]
        if uids and self._on_evict is not None and call.partition != VAL:
            groups = map(self._index(call.partition).find, uids)
            rows = {key: tag for group in groups for key, tag in group.all_rows()}
            tags = [dict(tag) for tag in rows.values()]
            roots = {ROLLOUT_ROOT_KEYS: uids}
            self._on_evict(KVBatchMeta(list(rows), tags, call.partition, None, roots))
        self._remove(uids, call.partition)

    def _replace(self, evicted: list[PromptOutcome], refills: list[int], call: SampleCall) -> None:
        """Replace `evicted`; `refills` counts the replacements that led to each new prompt."""
        assert self._refill is not None
        uids = self._refill(call.partition, evicted)
        uids = [outcome.uid for outcome in evicted] if uids is None else list(uids)
        if len(uids) != len(evicted):
            raise RlskipError(
                f"the refill callback returned {len(uids)} uids for {len(evicted)} prompts",
                remedy="return one uid per prompt, in order, or None",
            )
        self._owed[call.partition].update(uids)
        for uid, n in zip(uids, refills, strict=True):
            self._refills[call.partition, uid] = n

    def _choose(self, call: SampleCall) -> list[PromptGroup] | None:
        """The groups to return, or None to go on waiting."""
        index = self._index(call.partition)
        if call.batch_size is None:
            if call.only_step in index.steps(State.RUNNING) or self._owed[call.partition]:
                return None
            groups = list(index.groups(State.COMPLETE, call.only_step))
            if not groups and call.dropped:
                raise call.incomplete(call.dropped, "(every prompt was dropped)")
            return groups or None
        if self._about_to_be_stale(call) or self._drains(call):
            return None
        fresh = (
            group
            for group in index.groups(State.COMPLETE)
            if not self._is_stale(group.step, call.step, call.partition)
        )
        # Nothing replaces a dropped prompt of a validation batch, so nothing is waited for.
        dropped = len(call.dropped) if call.partition == VAL else 0
        if dropped >= call.batch_size:
            raise call.incomplete(call.dropped, "(every prompt was dropped)")
        groups = list(itertools.islice(fresh, call.batch_size - dropped))
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
        outcomes = self._outcomes(viable, call.partition)
        short = [outcome for outcome in outcomes if not outcome.complete]
        if short:
            call.short = len(short)
            log.warning(
                "%s: sampling viable groups with missing sessions:%s", call, name_prompts(short)
            )
        self._index(call.partition).mark_sampled(groups)
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
        now = time.monotonic()
        timeout_at = call.started + self.config.timeout_s
        if now >= timeout_at:
            raise call.timed_out(self._missing(call), self._situation(call))
        if now >= call.logged + self.config.progress_interval_s:
            call.logged = now
            log.info(
                "%s: waiting for %.0f of %.0f s; %s%s",
                call,
                now - call.started,
                self.config.timeout_s,
                self._situation(call),
                name_prompts(self._missing(call)),
            )
        return min(timeout_at, call.logged + self.config.progress_interval_s) - now

    def _drains(self, call: SampleCall) -> bool:
        """Whether to wait for all that was submitted, because its surplus is discarded."""
        if self._filter is None or not self._filter.discards_surplus or call.partition == VAL:
            return False
        running = self._index(call.partition).steps(State.RUNNING)
        return bool(any(running.values()) or self._owed[call.partition])
