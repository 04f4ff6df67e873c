"""The replay buffer: complete groups for the trainer, or an error that names what is missing."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from typing import Any
from weakref import WeakValueDictionary

from tensordict import TensorDict

from rlskip.batch.prompts import named
from rlskip.config.replay import read_replay
from rlskip.errors import ConfigError, RlskipError
from rlskip.keys import ROLLOUT_ROOT_KEYS, integer
from rlskip.queue.filtering import GroupFilter
from rlskip.queue.incomplete import IncompleteRolloutError, name_prompts
from rlskip.queue.partitions import Partitions
from rlskip.queue.protocol import KVBatchMeta, TrajectoryQueue
from rlskip.queue.readiness import PromptGroup, PromptOutcome, State
from rlskip.queue.sampling import SampleCall

log = logging.getLogger(__name__)

#: Called with the partition and the prompts just evicted. It submits their replacements and
#: returns the new uids, one per prompt and in order, or None if the prompts run again under their
#: own uids. The buffer is locked during the call, so it must not wait for a thread that uses it.
Refill = Callable[[str, list[PromptOutcome]], "Sequence[str] | None"]

# Another thread that uses the same buffer may poll the change that this thread waits for.
_LONGEST_WAIT_S = 1.0

# The last buffer of each queue, by the queue's id: a queue of the user's may have no hash. The id
# is nobody else's, because a buffer keeps its queue.
_last: WeakValueDictionary[int, ReplayBuffer] = WeakValueDictionary()


class ReplayBuffer:
    """Samples complete groups from a trajectory queue.

    The buffer keeps the queue's tags, never its rows. It is thread-safe: while one thread waits
    in :meth:`sample`, others may count and clear. A queue has one buffer: once another is made
    for it, this one samples nothing more.

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
    clock
        Returns the time in seconds; the deadlines of :meth:`sample` are on it.

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = read_replay(config)
        needs_refill = self.config.on_incomplete == "refill" or group_filter is not None
        if needs_refill and refill is None:
            raise ConfigError(
                "refill needs a callback that submits prompts",
                "replay.on_incomplete" if group_filter is None else "group_filter",
                "pass it as ReplayBuffer(..., refill=...); collect() uses dispatcher.buffer",
            )
        #: The groups that the filter rejected in the last call, counted by the metric's value.
        self.rejected: Counter[float] = Counter()
        self._queue = queue
        self._partitions = Partitions(queue, self.config)
        self._refill = refill
        self._filter = group_filter
        self._on_evict = on_evict
        self._clock = clock
        # Held while tags are read or groups change, and never while a call waits.
        self._lock = threading.RLock()
        _last[id(queue)] = self

    def reserve(self, uids: Iterable[str], partition: str) -> None:
        """Leave these prompts, until they are deleted, to calls of :meth:`sample` that name them.

        Called before they are submitted: several callers may then use the buffer at once.
        """
        with self._lock:
            self._partitions[partition].reserved.update(named(uids))

    def sample(
        self,
        step: int,
        partition: str,
        batch_size: int | None = None,
        uids: set[str] | None = None,
        stop: threading.Event | None = None,
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
        uids
            Sample these prompts only, which the call reserves; it adds the prompts that
            replace them. Without a batch size it waits for all of them that it did not evict
            itself. None: all that are not reserved.
        stop
            Once it is set, the call changes nothing more, and raises CancelledError.

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
        if _last.get(id(self._queue), self) is not self:
            raise RlskipError(
                "another ReplayBuffer was made for this queue, and two would sample its groups "
                "twice",
                remedy="use that one (collect() uses dispatcher.buffer), or a queue for each",
            )
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if (number := integer(step)) is None:  # no prompt would ever be of this step
            raise ValueError(f"step must be a whole number, got {step!r}")
        if uids is not None:
            names = named(uids)
            uids.clear()  # the caller's set, to which replacements are added
            uids.update(names)
        now = self._clock()
        with self._lock:
            known = self._partitions[partition]
            known.reserved.update(uids or ())
            group_filter = None if known.validates else self._filter
            call = SampleCall(number, known, batch_size, uids, group_filter, stop, now, now)
        while True:
            with self._lock:
                self._look(call)
                # Once a round: a refill may be stale itself, and would be replaced without end.
                self._evict_stale(call)
                while self._evict_or_replace(call):
                    # Replacements may have finished already, and be rejected, without end. The time
                    # is checked after they are there: no evicted prompt is left without one.
                    self._look(call)
                    if call.submitted:
                        self._check_time(call)
                groups = self._choose(call)
                if groups is not None:
                    self._discard_surplus(groups, call)
                    self.rejected = call.rejected
                    return self._take(groups, call), call.metrics()
                patience = self._check_time(call)
            self._partitions.watch.wait_change(min(patience, _LONGEST_WAIT_S))

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
            raise IncompleteRolloutError(
                f"rows changed after they were sampled:{name_prompts(changed)}",
                f"partition {partition!r}",
                "a worker wrote after its attempt was given up; write rows under session.key(i), "
                "with session.tag(), so that attempts share no key",
                partition=partition,
                prompts=changed,
            )

    def get_sampleable_count(self, step: int, partition: str) -> int:
        """The number of prompts of any step that `sample` could return now; nothing is evicted."""
        with self._lock:
            self._partitions.sync()
            known = self._partitions[partition]
            complete = known.groups(State.COMPLETE)
            fresh = [group for group in complete if not known.is_stale(group.step, step)]
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

    def give_back(self, batch: KVBatchMeta) -> None:
        """Let the groups of a sampled batch, which was not used, be sampled again."""
        with self._lock:
            self._partitions.sync()
            known = self._partitions[str(batch.partition_id)]
            roots = (batch.extra_info or {})[ROLLOUT_ROOT_KEYS]
            known.mark_sampled([known.find(uid) for uid in roots], sampled=False)

    def evict(self, uids: Iterable[str], partition: str) -> None:
        """Delete prompts in any state from the queue: roots, rows and markers."""
        with self._lock:
            self._partitions.sync()
            self._partitions.remove(named(uids), partition)

    # -- the steps of sample(), in this order --------------------------------------------------

    def _look(self, call: SampleCall) -> None:
        if call.stop is not None and call.stop.is_set():
            raise CancelledError
        self._partitions.sync()

    def _evict_stale(self, call: SampleCall) -> None:
        stale = [] if call.batch_size is None else call.partition.stale(call.step, call.uids)
        if not stale:
            return
        outcomes = [group.outcome() for group in stale]
        call.stale_spans += [call.step - (outcome.step or 0) + 1 for outcome in outcomes]
        log.warning("%s: evicting stale prompts:%s", call, name_prompts(outcomes))
        self._discard(stale, call)
        if self._refill is not None:
            call.to_replace += [(outcome, 0) for outcome in outcomes]

    def _evict_or_replace(self, call: SampleCall) -> bool:
        """Returns whether any group was evicted or replaced."""
        evicted = self._evict_incomplete(call) | self._evict_rejected(call)
        return self._replace_evicted(call) or evicted

    def _evict_incomplete(self, call: SampleCall) -> bool:
        """Apply ``replay.on_incomplete``."""
        groups = list(call.groups(State.INCOMPLETE))
        if not groups:
            return False
        outcomes = [group.outcome() for group in groups]
        policy = self.config.on_incomplete
        # A refill submits a training prompt, which must not stand in for one of validation.
        if policy == "drop" or (policy == "refill" and call.partition.validates):
            call.dropped += outcomes
            log.warning("%s: dropping incomplete prompts:%s", call, name_prompts(outcomes))
        elif policy == "refill":
            most, refills = self.config.max_refills, [group.refills for group in groups]
            exhausted = [o for o, n in zip(outcomes, refills, strict=True) if n >= most]
            if exhausted:
                raise call.incomplete(exhausted, f"after {most} refills (replay.max_refills)")
            call.refilled += len(groups)
            call.to_replace += [(o, n + 1) for o, n in zip(outcomes, refills, strict=True)]
            log.warning("%s: refilling incomplete prompts:%s", call, name_prompts(outcomes))
        else:
            raise call.incomplete(outcomes)
        self._discard(groups, call)
        return True

    def _evict_rejected(self, call: SampleCall) -> bool:
        if (group_filter := call.group_filter) is None:
            return False
        rejected = group_filter.rejected(call.partition.name, call.groups(State.COMPLETE))
        call.rejected.update(group.metric for group in rejected)
        replaced = [(group.outcome(), 0) for group in rejected]
        call.to_replace += replaced * group_filter.refills
        self._discard(rejected, call)
        return bool(rejected)

    def _replace_evicted(self, call: SampleCall) -> bool:
        """Submit replacements, as many as may be; returns whether there were any."""
        now, group_filter = call.to_replace, call.group_filter
        if now and group_filter is not None:
            complete = call.count(State.COMPLETE)
            enough = complete >= (call.batch_size or 1)
            running = call.partition.count(State.RUNNING, None, call.uids)
            running += len(call.announced())
            if enough and group_filter.discards_surplus:
                call.to_replace = []
            now = call.to_replace[: group_filter.room(running, call.submitted)]
            if call.to_replace and not (now or running or enough):
                raise call.rejected_too_many(complete)
        if not now:
            return False
        call.to_replace = call.to_replace[len(now) :]
        call.submitted += len(now)
        assert self._refill is not None
        evicted = [outcome for outcome, _ in now]
        uids = self._refill(call.partition.name, evicted)
        uids = [outcome.uid for outcome in evicted] if uids is None else named(uids)
        if len(uids) != len(now):
            raise RlskipError(
                f"the refill callback returned {len(uids)} uids for {len(now)} prompts",
                remedy="return one uid per prompt, in order, or None",
            )
        for uid, (_, refills) in zip(uids, now, strict=True):
            call.partition.announce(uid, refills)
        if call.uids is not None:
            call.uids.update(uids)
            call.awaited.update(uids)
            call.partition.reserved.update(uids)
        return True

    def _choose(self, call: SampleCall) -> list[PromptGroup] | None:
        """The groups to return, or None to go on waiting."""
        partition = call.partition
        underway = call.count(State.RUNNING) or call.announced()
        complete = call.groups(State.COMPLETE)
        if call.batch_size is None:
            if underway:
                return None
            groups = list(complete)
            if call.awaited - {group.uid for group in groups}:
                return None
            if not groups and call.dropped:
                raise call.incomplete(call.dropped, "(every prompt was dropped)")
            return groups or None
        # All that was submitted, if its surplus is discarded.
        if (call.discards_surplus and underway) or partition.about_to_be_stale(call.step):
            return None
        # Nothing replaces a dropped prompt of a validation batch, so nothing is waited for.
        size = call.batch_size - (len(call.dropped) if partition.validates else 0)
        if size <= 0:
            raise call.incomplete(call.dropped, "(every prompt was dropped)")
        fresh = (group for group in complete if not partition.is_stale(group.step, call.step))
        groups = list(itertools.islice(fresh, size))
        return groups if len(groups) == size else None

    def _discard_surplus(self, groups: list[PromptGroup], call: SampleCall) -> None:
        if call.discards_surplus:
            taken = {group.uid for group in groups}
            surplus = [g for g in call.groups(State.COMPLETE) if g.uid not in taken]
            call.surplus = len(surplus)
            self._discard(surplus, call)

    def _discard(self, groups: Sequence[PromptGroup], call: SampleCall) -> None:
        if groups:
            if self._on_evict is not None and not call.partition.validates:
                self._on_evict(call.batch(groups, PromptGroup.all_rows))
            uids = [group.uid for group in groups]
            self._partitions.remove(uids, call.partition.name)
            call.awaited.difference_update(uids)

    def _take(self, groups: list[PromptGroup], call: SampleCall) -> KVBatchMeta:
        """The batch of these groups, which are sampled from now on."""
        # Under any other policy, no session is missing.
        viable = groups if self.config.on_incomplete == "min_viable" else []
        short = [outcome for group in viable if not (outcome := group.outcome()).complete]
        if short:
            call.short = len(short)
            names = name_prompts(short)
            log.warning("%s: sampling viable groups with missing sessions:%s", call, names)
        batch = call.batch(groups, PromptGroup.successful_rows)
        call.partition.mark_sampled(groups)
        return batch

    def _check_time(self, call: SampleCall) -> float:
        """Log a progress line when one is due; returns the seconds until the next.

        Raises ReplayTimeoutError when ``replay.timeout_s`` has passed.
        """
        now = self._clock()
        timeout_at = call.started + self.config.timeout_s
        if now >= timeout_at:
            raise call.timed_out(now)
        if now >= call.logged + self.config.progress_interval_s:
            call.logged = now
            text = "%s: waiting for %.0f of %.0f s; %s%s"
            situation = call.situation(), name_prompts(call.running())
            log.info(text, call, now - call.started, self.config.timeout_s, *situation)
        return min(timeout_at, call.logged + self.config.progress_interval_s) - now
