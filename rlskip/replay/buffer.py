"""The replay buffer: whole groups for the trainer, or an error that says what is missing."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rlskip.config.replay import read_replay
from rlskip.errors import ConfigError, RlskipError
from rlskip.keys import ROLLOUT_ROOT_KEYS, VAL
from rlskip.queue import KVBatchMeta, TrajectoryQueue
from rlskip.replay.call import Call
from rlskip.replay.errors import name_prompts
from rlskip.replay.index import PartitionIndex
from rlskip.replay.readiness import Group, PromptOutcome, State, state_of

log = logging.getLogger(__name__)

#: Called with the partition and the prompts just evicted. It submits their replacements and
#: returns their uids, one per prompt, in order; None when they run again under their own uids.
#: Other threads cannot use the buffer meanwhile, so it must not wait for one that does.
Refill = Callable[[str, list[PromptOutcome]], "Sequence[str] | None"]

# Another thread that uses the same buffer may take in the change that this one waits for.
_LONGEST_WAIT_S = 1.0


class ReplayBuffer:
    """Hands whole groups from a trajectory queue to the trainer.

    It keeps the queue's tags, never its rows. Any thread may call it; while one waits in
    :meth:`sample`, others may count and clear.

    Parameters
    ----------
    queue
        Where sessions put their rows and markers.
    config
        A full DictConfig, a mapping with an entry `replay`, a :class:`ReplayConfig`, or None
        for the defaults.
    refill
        Replaces evicted prompts: those that ``on_incomplete: refill`` evicts, and stale ones.

    Raises
    ------
    ConfigError
        The config cannot be honoured; every problem is named.
    """

    def __init__(
        self, queue: TrajectoryQueue, config: Any = None, *, refill: Refill | None = None
    ) -> None:
        self.config = read_replay(config)
        if self.config.on_incomplete == "refill" and refill is None:
            raise ConfigError(
                "refill needs a callback that submits prompts, and there is none",
                "replay.on_incomplete",
                "pass it as ReplayBuffer(..., refill=...)",
            )
        self._refill = refill
        self._queue = queue
        self._watch = queue.watch()
        self._lock = threading.RLock()
        self._partitions: dict[str, PartitionIndex] = {}
        # partition -> uids that a refill announced and the queue does not hold yet
        self._owed: dict[str, set[str]] = defaultdict(set)
        # (partition, uid) -> how many prompts it replaces, one after another
        self._refills: dict[tuple[str, str], int] = {}

    def sample(
        self, global_steps: int, partition_id: str, batch_size: int | None = None
    ) -> tuple[KVBatchMeta, dict[str, int]]:
        """Wait for whole groups and take them; no group is ever sampled twice.

        Parameters
        ----------
        global_steps
            The trainer's step.
        partition_id
            ``train``, ``val``, or any other.
        batch_size
            None: all prompts submitted at step `global_steps`, once all of them are over.
            A number: that many prompts of any step, the oldest first.

        Returns
        -------
        batch : KVBatchMeta
            The rows of the successful sessions, group by group, each by session and index.
            ``extra_info["rollout_root_keys"]`` holds the prompts' keys.
        metrics : dict
            Prompts evicted, refilled, and sampled short of sessions during this call.

        Raises
        ------
        IncompleteRolloutError
            A group is over and not whole, and ``replay.on_incomplete`` does not let it pass.
        ReplayTimeoutError
            ``replay.timeout_s`` is over; names the prompts and sessions still missing.
        """
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        call = Call(global_steps, partition_id, batch_size)
        while True:
            with self._lock:
                self._sync()
                self._evict_stale(call)
                while self._evict_broken(call):
                    self._sync()  # a refill may have put prompts, and they may be over already
                groups = self._choose(call)
                if groups is not None:
                    return self._take(groups, call), call.metrics()
                patience = self._check_time(call)
            self._watch.wait_change(min(patience, _LONGEST_WAIT_S))

    def get_sampleable_count(self, global_steps: int, partition_id: str) -> int:
        """How many prompts `sample` could take now, whatever their step; takes and evicts none."""
        with self._lock:
            self._sync()
            counts = self._index(partition_id).steps(State.WHOLE)
            return sum(
                count
                for step, count in counts.items()
                if not self._is_stale(step, global_steps, partition_id)
            )

    def clear(self, batch: KVBatchMeta) -> None:
        """Remove a sampled batch from the queue: its rows, its prompts and their markers.

        Give it the whole batch. A chunk names the root keys of all.
        """
        roots = (batch.extra_info or {}).get(ROLLOUT_ROOT_KEYS)
        if roots is None or batch.partition_id is None:
            raise RlskipError(
                "this batch does not say which prompts it holds",
                f"extra_info[{ROLLOUT_ROOT_KEYS!r}]",
                "clear what sample() returned, or call evict(uids, partition_id)",
            )
        self.evict(roots, batch.partition_id)

    def evict(self, uids: Iterable[str], partition_id: str) -> None:
        """Remove prompts from the queue, wherever they stand: roots, rows and markers."""
        with self._lock:
            self._sync()
            self._remove(list(uids), partition_id)

    # -- what sample() does, in this order -----------------------------------------------------
    def _sync(self) -> None:
        for partition_id, changes in self._watch.changes().items():
            index = self._index(partition_id)
            index.apply(changes)
            owed = self._owed[partition_id]
            owed.difference_update([uid for uid in owed if index.has_prompt(uid)])

    def _evict_stale(self, call: Call) -> None:
        if call.batch_size is None:
            return
        index = self._index(call.partition_id)
        stale = [
            group
            for state in (State.WHOLE, State.BROKEN)
            for step in index.steps(state)
            if self._is_stale(step, call.global_steps, call.partition_id)
            for group in index.groups(state, step)
        ]
        if not stale:
            return
        outcomes = self._outcomes(stale, call.partition_id)
        call.stale += len(outcomes)
        log.warning("%s: evicting stale prompts:%s", call, name_prompts(outcomes))
        self._remove([outcome.uid for outcome in outcomes], call.partition_id)
        if self._refill is not None:
            self._replace(outcomes, [0] * len(outcomes), call)

    def _evict_broken(self, call: Call) -> bool:
        """Judge incomplete groups by ``replay.on_incomplete``; tells whether any was evicted."""
        index = self._index(call.partition_id)
        broken = self._outcomes(index.groups(State.BROKEN, call.only_step), call.partition_id)
        if not broken:
            return False
        policy = self.config.on_incomplete
        if policy == "drop":
            call.dropped += broken
            log.warning("%s: dropping incomplete prompts:%s", call, name_prompts(broken))
            self._remove([outcome.uid for outcome in broken], call.partition_id)
        elif policy == "refill":
            self._refill_broken(broken, call)
        else:
            raise call.incomplete(broken)
        return True

    def _refill_broken(self, broken: list[PromptOutcome], call: Call) -> None:
        refills = [self._refills.get((call.partition_id, outcome.uid), 0) for outcome in broken]
        most = self.config.max_refills
        hopeless = [outcome for outcome, n in zip(broken, refills, strict=True) if n >= most]
        if hopeless:
            raise call.incomplete(hopeless, f"after {most} refills (replay.max_refills)")
        call.refilled += len(broken)
        log.warning("%s: refilling incomplete prompts:%s", call, name_prompts(broken))
        self._remove([outcome.uid for outcome in broken], call.partition_id)
        self._replace(broken, [n + 1 for n in refills], call)

    def _replace(self, evicted: list[PromptOutcome], refills: list[int], call: Call) -> None:
        """Have `evicted` replaced; `refills` counts the replacements in each one's line."""
        assert self._refill is not None
        uids = self._refill(call.partition_id, evicted)
        uids = [outcome.uid for outcome in evicted] if uids is None else list(uids)
        if len(uids) != len(evicted):
            raise RlskipError(
                f"the refill callback returned {len(uids)} uids for {len(evicted)} prompts",
                remedy="return one uid per prompt, in order, or None",
            )
        self._owed[call.partition_id].update(uids)
        for uid, n in zip(uids, refills, strict=True):
            self._refills[call.partition_id, uid] = n

    def _choose(self, call: Call) -> list[Group] | None:
        """The groups to return; None while there is a reason to wait."""
        index = self._index(call.partition_id)
        if call.batch_size is None:
            if call.only_step in index.steps(State.RUNNING) or self._owed[call.partition_id]:
                return None
            groups = list(index.groups(State.WHOLE, call.only_step))
            if not groups and call.dropped:
                raise call.incomplete(call.dropped, "and with them every prompt was dropped")
            return groups or None
        if self._about_to_be_stale(call):
            return None
        fresh = (
            group
            for group in index.groups(State.WHOLE)
            if not self._is_stale(group.step, call.global_steps, call.partition_id)
        )
        groups = list(itertools.islice(fresh, call.batch_size))
        return groups if len(groups) == call.batch_size else None

    def _take(self, groups: list[Group], call: Call) -> KVBatchMeta:
        # Not pairs of them: a million tuples keep the garbage collector busy.
        keys: list[str] = []
        tags: list[Any] = []  # KVBatchMeta copies them
        for group in groups:
            for key, tag in group.successful_rows():
                keys.append(key)
                tags.append(tag)
        # Else only complete groups are whole.
        doubtful = groups if self.config.on_incomplete == "min_viable" else []
        outcomes = self._outcomes(doubtful, call.partition_id)
        short = [outcome for outcome in outcomes if not outcome.complete]
        if short:
            call.short = len(short)
            log.warning("%s: sampling short but viable groups:%s", call, name_prompts(short))
        self._index(call.partition_id).take(groups)
        return KVBatchMeta(
            keys=keys,
            tags=tags,
            partition_id=call.partition_id,
            extra_info={ROLLOUT_ROOT_KEYS: [group.uid for group in groups]},
        )

    def _check_time(self, call: Call) -> float:
        """Say now and then what the call waits for; returns the seconds until it is next due.

        Raises ReplayTimeoutError when the call's time is over.
        """
        now = time.monotonic()
        timeout_at = call.started + self.config.timeout_s
        if now >= timeout_at:
            raise call.timed_out(self._missing(call), self._situation(call))
        if now >= call.spoke + self.config.progress_interval_s:
            call.spoke = now
            log.info(
                "%s: waiting for %.0f of %.0f s; %s%s",
                call,
                now - call.started,
                self.config.timeout_s,
                self._situation(call),
                name_prompts(self._missing(call)),
            )
        return min(timeout_at, call.spoke + self.config.progress_interval_s) - now

    # -- what the above ask ----------------------------------------------------------------------
    def _index(self, partition_id: str) -> PartitionIndex:
        index = self._partitions.get(partition_id)
        if index is None:
            expected = self._expected(partition_id)
            k = self.config.min_viable if self.config.on_incomplete == "min_viable" else None
            index = PartitionIndex(lambda group: state_of(group, expected, k))
            self._partitions[partition_id] = index
        return index

    def _expected(self, partition_id: str) -> int | None:
        """Sessions to expect of a prompt whose tag does not say."""
        return self.config.val_n if partition_id == VAL else self.config.n

    def _outcomes(self, groups: Iterable[Group], partition_id: str) -> list[PromptOutcome]:
        expected = self._expected(partition_id)
        return [PromptOutcome.of(group, expected) for group in groups]

    def _remove(self, uids: Sequence[str], partition_id: str) -> None:
        self._queue.clear(self._index(partition_id).remove(uids), partition_id)
        # A watch that polls must see them gone before a refill puts the same keys again.
        self._sync()
        self._owed[partition_id].difference_update(uids)
        for uid in uids:
            self._refills.pop((partition_id, uid), None)

    def _is_stale(self, step: int | None, call_step: int, partition_id: str) -> bool:
        """Whether to drop the groups of `step`: they span more steps than the threshold."""
        limit = self._age_limit("drop", partition_id)
        return limit is not None and step is not None and call_step - step + 1 > limit

    def _about_to_be_stale(self, call: Call) -> bool:
        """Whether a prompt in flight has reached the threshold and must be waited for."""
        limit = self._age_limit("wait", call.partition_id)
        running = self._index(call.partition_id).steps(State.RUNNING)
        return limit is not None and any(
            step is not None and call.global_steps - step + 1 >= limit for step in running
        )

    def _age_limit(self, strategy: str, partition_id: str) -> int | None:
        on = self.config.max_off_policy_strategy == strategy and partition_id != VAL
        return self.config.max_off_policy_threshold if on else None

    def _missing(self, call: Call) -> list[PromptOutcome]:
        """The prompts in flight that this call waits for."""
        index = self._index(call.partition_id)
        return self._outcomes(index.groups(State.RUNNING, call.only_step), call.partition_id)

    def _situation(self, call: Call) -> str:
        """What is there and what is not, in one line."""
        index, only = self._index(call.partition_id), call.only_step

        def count(state: State) -> int:
            steps = index.steps(state)
            return sum(steps.values()) if only is None else steps.get(only, 0)

        whole, running, owed = (
            count(State.WHOLE),
            count(State.RUNNING),
            self._owed[call.partition_id],
        )
        wanted = whole + running + len(owed) if call.batch_size is None else call.batch_size
        said = [f"{whole} of {wanted} prompts are whole, {running} are under way"]
        if self._about_to_be_stale(call):
            said.append("prompts in flight that are about to be stale come first")
        if owed:
            said.append(f"refills that have not arrived: {_names(owed)}")
        if call.dropped:
            said.append(f"{len(call.dropped)} were incomplete and dropped")
        if taken := count(State.TAKEN):
            said.append(f"{taken} were sampled before")
        if loose := [group.uid for group in index.groups(State.LOOSE)]:
            said.append(f"without a prompt that has a step: {_names(loose)}")
        return "; ".join(said)


def _names(uids: Iterable[str], most: int = 10) -> str:
    uids = list(uids)
    return ", ".join(uids[:most]) + (f" and {len(uids) - most} more" if len(uids) > most else "")
