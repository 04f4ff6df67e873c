"""One call of ``collect``: it waits for groups, judges them, and makes one batch of their rows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rlskip.config.replay import ReplayConfig
from rlskip.dispatch.batch import Group, Held, Prompt
from rlskip.keys import VAL, trajectory_key
from rlskip.queue import PromptOutcome
from rlskip.queue.incomplete import Call, name_prompts
from rlskip.queue.rows import one_batch

logger = logging.getLogger(__name__)


class Taking(Call):
    """Takes the groups of prompts, judged by the node `replay`, with one deadline for all waits.

    Parameters
    ----------
    held
        The dispatcher's prompts.
    config
        The node `replay`.
    step, partition
        Of the call.
    size
        Take so many prompts of any step, the oldest first; None: all.
    own
        The prompts of the batch that the call submitted; None: those of `held`.
    errors
        Raises what kept a batch from its groups.
    """

    def __init__(
        self,
        held: Held,
        config: ReplayConfig,
        step: int,
        partition: str,
        size: int | None,
        own: Sequence[Prompt] | None,
        errors: Callable[[], object],
    ) -> None:
        super().__init__(partition, step, size)
        self._held = held
        self._config = config
        self._own = own
        self._errors = errors
        self._spans: list[int] = []
        self._dropped: list[PromptOutcome] = []
        self._short = 0

    def groups(self, started: float) -> list[Group]:
        """Wait for the groups and take them; the deadline counts from `started`."""
        ends, logged = started + self._config.timeout_s, started
        with self._held.waiting_for(self.batch_size) as changed:
            while True:
                self._errors()
                if (found := self._choose()) is not None:
                    self._held.take(found)
                    return [prompt.group for prompt in found]
                now = time.monotonic()
                if now >= ends:
                    raise self.timed_out(now - started, self._situation(), self._running())
                if now >= logged + self._config.progress_interval_s:
                    logged, said = now, self._situation() + name_prompts(self._running())
                    logger.info("%s: waiting for %.0f s; %s", self, now - started, said)
                due = min(ends, logged + self._config.progress_interval_s)
                changed.wait(due - now)

    def metrics(self) -> dict[str, float]:
        """What the call dropped, under the names that verl logs."""
        return self.metrics_of(self._spans, len(self._dropped), short=self._short)

    def _choose(self) -> list[Prompt] | None:
        """The prompts whose groups are returned, or None to go on waiting."""
        mine = self._mine()
        if self.batch_size is None:
            if not mine or not all(prompt.batch.done() for prompt in mine):
                return None
            if not (left := self._judged(mine)):
                raise self.all_dropped(self._dropped)
            return left
        ended = [prompt for prompt in mine if not prompt.running]
        most = self._config.max_off_policy_threshold
        strategy = "none" if self.name == VAL else self._config.max_off_policy_strategy
        if strategy == "drop" and most is not None:
            stale = [prompt for prompt in ended if self._span(prompt) > most]
            self._spans += [self._span(prompt) for prompt in stale]
            ended = self._without(ended, stale, "stale")
        due = [prompt for prompt in mine if prompt.running and self._span(prompt) >= (most or 0)]
        if strategy == "wait" and due:
            return None
        ended = self._judged(ended)
        # Nothing replaces a dropped prompt of a validation batch, so nothing is waited for.
        size = self.batch_size - (len(self._dropped) if self.name == VAL else 0)
        if size <= 0:
            raise self.all_dropped(self._dropped)
        return ended[:size] if len(ended) >= size else None

    def _judged(self, ended: list[Prompt]) -> list[Prompt]:
        """Those of these groups that are complete enough; drops the others, or raises."""
        policy, viable = self._config.on_incomplete, self._config.min_viable
        bad = [prompt for prompt in ended if prompt.group.failed]
        if policy == "min_viable" and viable is not None:
            fine = [prompt for prompt in bad if len(prompt.group.rows) >= min(viable, prompt.n)]
            bad = [prompt for prompt in bad if prompt not in fine]
            self._short = len(fine)
        outcomes = [prompt.group.outcome() for prompt in bad]
        if bad and policy != "drop":
            self._held.take(bad)  # the error has them
            raise self.incomplete(outcomes)
        self._dropped += outcomes
        return self._without(ended, bad, "incomplete")

    def _without(self, ended: list[Prompt], bad: list[Prompt], what: str) -> list[Prompt]:
        """`ended` without those that are dropped."""
        if not bad:
            return ended
        names = name_prompts([prompt.group.outcome() for prompt in bad])
        logger.warning("%s: dropping %s prompts:%s", self, what, names)
        self._held.take(bad)
        if self._own is not None:
            self._own = [prompt for prompt in self._own if prompt not in bad]
        return [prompt for prompt in ended if prompt not in bad]

    def _mine(self) -> list[Prompt]:
        if self._own is not None:
            return list(self._own)
        return self._held.of(self.name, self.step if self.batch_size is None else None)

    def _span(self, prompt: Prompt) -> int:
        return self.step - prompt.batch.step + 1

    def _running(self) -> list[PromptOutcome]:
        return [prompt.group.outcome() for prompt in self._mine() if prompt.running]

    def _situation(self) -> str:
        all_, running = len(self._mine()), len(self._running())
        wanted = all_ if self.batch_size is None else self.batch_size
        facts = f"{all_ - running} of {wanted} prompts have ended, {running} run"
        if self._dropped:
            facts += f"; {len(self._dropped)} were incomplete and dropped"
        if self._spans:
            facts += f"; {len(self._spans)} were stale and dropped"
        return facts


def joined(groups: Sequence[Group], partition: str, fill_missing: bool) -> TensorDict:
    """The rows of groups as one batch, by group, session and index, with uid and session_id.

    Raises
    ------
    UnequalFieldsError
        A row lacks a field that another one has, and it may not be filled with None.
    """
    by_key: dict[str, Any] = {}
    uids: list[NonTensorData] = []
    sessions: list[int] = []
    for group in groups:
        uid = NonTensorData(group.uid)  # one a prompt: one a row takes longer than all else here
        for session in sorted(group.rows):
            rows = group.rows[session]
            by_key.update((trajectory_key(group.uid, session, i), r) for i, r in enumerate(rows))
            uids += [uid] * len(rows)
            sessions += [session] * len(rows)
    batch = one_batch(by_key, partition, fill_missing, own=True)
    if "uid" not in batch:
        batch["uid"] = NonTensorStack(*uids)
    if "session_id" not in batch:
        batch["session_id"] = torch.tensor(sessions)
    return batch
