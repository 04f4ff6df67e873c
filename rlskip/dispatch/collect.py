"""The groups that a dispatcher holds until its trainer takes them, and what they become.

:class:`Taking` is one call of ``collect``: it waits for prompts, judges their groups by the node
`replay`, and makes one batch of their rows. It has one deadline, ``replay.timeout_s``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rlskip.config.replay import ReplayConfig
from rlskip.dispatch.batch import BatchHandle, Group, Prompt
from rlskip.dispatch.units import BatchError
from rlskip.keys import VAL, trajectory_key
from rlskip.queue import IncompleteRolloutError, PromptOutcome, ReplayTimeoutError
from rlskip.queue.incomplete import name_prompts
from rlskip.queue.rows import check_fields, filled, to_batch
from rlskip.queue.sampling import sample_metrics

logger = logging.getLogger(__name__)


class Prompts:
    """The prompts of a dispatcher that run, or whose groups nobody has taken, the oldest first.

    Any thread may call; `changed` is notified when a batch has ended and, while a call waits for
    some of the prompts, with every group.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.some = 0  # calls that wait for a number of prompts
        self._held: dict[tuple[str, str], Prompt] = {}  # by partition and uid

    def add(self, batch: BatchHandle) -> None:
        """Hold a batch's prompts from now on.

        Raises
        ------
        BatchError
            An earlier prompt of a uid runs, or its group was not taken: two would share keys.
        """
        with self.changed:
            for prompt in batch.prompts:
                if (batch.partition, prompt.uid) in self._held:
                    raise BatchError(
                        f"an earlier prompt of the uid {prompt.uid!r} is in flight",
                        "uid",
                        "give this one a uid of its own; or first take the other's group, or give "
                        "it up: cancel its batch",
                    )
            self._held.update({(batch.partition, prompt.uid): prompt for prompt in batch.prompts})

    def ended(self, prompt: Prompt) -> None:
        """A group has all its sessions; one that is in a queue is not held."""
        with self.changed:
            if prompt.batch.sinks:
                self._drop(prompt)
            if self.some:
                self.changed.notify_all()

    def batch_ended(self) -> None:
        """A batch has its report, or its error."""
        with self.changed:
            self.changed.notify_all()

    def take(self, prompts: Sequence[Prompt]) -> None:
        """Hold these no more."""
        with self.changed:
            for prompt in prompts:
                self._drop(prompt)

    def of(self, partition: str, step: int | None = None) -> list[Prompt]:
        """Those of a partition, and of one step or of any, by step and in order of submission."""
        found = [
            prompt
            for (name, _), prompt in self._held.items()
            if name == partition
            and step in (None, prompt.batch.step)
            and not (prompt.batch.sinks or prompt.batch.own)
        ]
        return sorted(found, key=lambda prompt: prompt.batch.step)

    def _drop(self, prompt: Prompt) -> None:
        place = prompt.batch.partition, prompt.uid
        if self._held.get(place) is prompt:
            del self._held[place]


@attrs.define
class Taking:
    """One call of ``collect``.

    `own` are the prompts of the batch that it submitted; None: those that `prompts` holds of the
    step, or of any step if there is a `size`.
    """

    prompts: Prompts
    config: ReplayConfig
    fill_missing: bool
    step: int
    partition: str
    size: int | None = None
    own: Sequence[Prompt] | None = None
    errors: Callable[[], object] = lambda: None  # raises what kept a batch from its groups
    started: float = attrs.field(factory=time.monotonic)
    _spans: list[int] = attrs.field(factory=list)
    _dropped: list[PromptOutcome] = attrs.field(factory=list)
    _short: int = 0

    def result(self) -> tuple[TensorDict, dict[str, float]]:
        """Wait for the groups, take them, and return their rows as one batch, and metrics."""
        groups = self._wait()
        rows = joined(groups, self.partition, self.fill_missing)
        metrics = sample_metrics(self.partition, self._spans, len(self._dropped), short=self._short)
        return rows, metrics

    def _wait(self) -> list[Group]:
        ends = self.started + self.config.timeout_s
        logged = self.started
        with self.prompts.changed:
            while True:
                self.errors()
                if (found := self._choose()) is not None:
                    self.prompts.take(found)
                    return [prompt.group for prompt in found]
                now = time.monotonic()
                if now >= ends:
                    raise self._timed_out(now)
                if now >= logged + self.config.progress_interval_s:
                    logged = now
                    logger.info(
                        "%s: waiting for %.0f s; %s", self, now - self.started, self._said()
                    )
                due = min(ends, logged + self.config.progress_interval_s)
                self.prompts.changed.wait(due - now)

    def _choose(self) -> list[Prompt] | None:
        """The prompts whose groups are returned, or None to go on waiting."""
        mine = self._mine()
        if self.size is None:
            if not mine or not all(prompt.batch.done() for prompt in mine):
                return None
            return self._judged(mine)
        ended = [prompt for prompt in mine if not prompt.running]
        most = self.config.max_off_policy_threshold
        strategy = "none" if self.partition == VAL else self.config.max_off_policy_strategy
        if strategy == "drop" and most is not None:
            stale = [prompt for prompt in ended if self._span(prompt) > most]
            self._spans += [self._span(prompt) for prompt in stale]
            self._evict(stale, "stale")
            ended = [prompt for prompt in ended if prompt not in stale]
        due = [prompt for prompt in mine if prompt.running and self._span(prompt) >= (most or 0)]
        if strategy == "wait" and due:
            return None
        ended = self._judged(ended)
        # Nothing replaces a dropped prompt of a validation batch, so nothing is waited for.
        size = self.size - (len(self._dropped) if self.partition == VAL else 0)
        if size <= 0:
            raise self._incomplete(self._dropped, " (every prompt was dropped)")
        return ended[:size] if len(ended) >= size else None

    def _judged(self, ended: list[Prompt]) -> list[Prompt]:
        """Those of these groups that are complete enough; drops the others, or raises."""
        policy, viable = self.config.on_incomplete, self.config.min_viable
        bad = [prompt for prompt in ended if prompt.group.failed]
        if policy == "min_viable" and viable is not None:
            fine = [prompt for prompt in bad if len(prompt.group.rows) >= min(viable, prompt.n)]
            bad = [prompt for prompt in bad if prompt not in fine]
            self._short = len(fine)
        if not bad:
            return ended
        outcomes = [prompt.group.outcome() for prompt in bad]
        if policy != "drop":
            self.prompts.take(bad)  # the error has them
            raise self._incomplete(outcomes)
        self._dropped += outcomes
        self._evict(bad, "incomplete")
        left = [prompt for prompt in ended if prompt not in bad]
        if not left and self.size is None:
            raise self._incomplete(self._dropped, " (every prompt was dropped)")
        return left

    def _evict(self, prompts: list[Prompt], what: str) -> None:
        if prompts:
            names = name_prompts([prompt.group.outcome() for prompt in prompts])
            logger.warning("%s: dropping %s prompts:%s", self, what, names)
            self.prompts.take(prompts)
            if self.own is not None:
                self.own = [prompt for prompt in self.own if prompt not in prompts]

    def _mine(self) -> list[Prompt]:
        if self.own is not None:
            return list(self.own)
        return self.prompts.of(self.partition, self.step if self.size is None else None)

    def _span(self, prompt: Prompt) -> int:
        return self.step - prompt.batch.step + 1

    # -- errors --------------------------------------------------------------------------------

    def __str__(self) -> str:
        return f"partition {self.partition!r}, step {self.step}"

    def _said(self) -> str:
        mine = self._mine()
        running = [prompt.group.outcome() for prompt in mine if prompt.running]
        wanted = len(mine) if self.size is None else self.size
        facts = f"{len(mine) - len(running)} of {wanted} prompts have ended, {len(running)} run"
        if self._dropped:
            facts += f"; {len(self._dropped)} were incomplete and dropped"
        if self._spans:
            facts += f"; {len(self._spans)} were stale and dropped"
        return facts + name_prompts(running)

    def _timed_out(self, now: float) -> IncompleteRolloutError:
        what = f"no batch after {now - self.started:.1f} s; {self._said()}"
        running = [prompt.group.outcome() for prompt in self._mine() if prompt.running]
        remedy = (
            "find out why the sessions are missing; raise replay.timeout_s if they are only slow"
        )
        return self._error(what, remedy, running, ReplayTimeoutError)

    def _incomplete(
        self, prompts: Sequence[PromptOutcome], when: str = ""
    ) -> IncompleteRolloutError:
        what = f"incomplete groups{when}:{name_prompts(prompts)}"
        remedy = (
            "find the cause in the logs of the sessions; replay.on_incomplete can drop or accept "
            "such groups (raise, drop, min_viable)"
        )
        return self._error(what, remedy, prompts)

    def _error(
        self,
        what: str,
        remedy: str,
        prompts: Sequence[PromptOutcome],
        kind: type[IncompleteRolloutError] = IncompleteRolloutError,
    ) -> IncompleteRolloutError:
        return kind(
            what, str(self), remedy, partition=self.partition, step=self.step, prompts=prompts
        )


def joined(groups: Sequence[Group], partition: str, fill_missing: bool) -> TensorDict:
    """The rows of groups as one batch, by group, session and index, with uid and session_id.

    Raises
    ------
    UnequalFieldsError
        A row lacks a field that another one has, and it may not be filled with None.
    """
    places = [
        (group.uid, session, index, row)
        for group in groups
        for session in sorted(group.rows)
        for index, row in enumerate(group.rows[session])
    ]
    by_key: dict[str, Any] = {trajectory_key(u, s, i): row for u, s, i, row in places}
    where = f"partition {partition!r}"
    if fill_missing:
        rows = filled(by_key, where)
    else:
        check_fields(by_key, where)
        rows = list(by_key.values())
    batch = to_batch(rows, own=True)
    if "uid" not in batch:
        # One object a prompt: to make one a row takes longer than all else here.
        uids = {group.uid: NonTensorData(group.uid) for group in groups}
        batch["uid"] = NonTensorStack(*(uids[uid] for uid, *_ in places))
    if "session_id" not in batch:
        batch["session_id"] = torch.tensor([session for _, session, *_ in places])
    return batch
