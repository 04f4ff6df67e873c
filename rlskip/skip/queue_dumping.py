"""The half of the role for groups that dumps: groups as they leave the queue.

They leave it in a sampled batch, or because the trainer evicts them. Groups that the role submitted
carry the step, position and content of their prompt in the root tag.
"""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any

import attrs

from rlskip.config.facts import HostFacts
from rlskip.errors import ConfigError
from rlskip.jobs.served import ledger_of
from rlskip.keys import (
    DUMP_CONTENT,
    DUMP_POSITION,
    DUMP_STEP,
    ROLLOUT_ROOT_KEYS,
    TRAIN,
    split_trajectory,
)
from rlskip.skip.call import Call
from rlskip.skip.dumps import Dumps, capture_rng
from rlskip.skip.groups import QueuedGroup, groups_in
from rlskip.skip.role import Role
from rlskip.skip.run_dumps import Group
from rlskip.skip.stage import Stage
from rlskip.skip.step_calls import Key
from rlskip.store import DumpError, DumpMeta, Identity
from rlskip.store.index import QUEUED
from rlskip.store.layout import part_name

if TYPE_CHECKING:
    from rlskip.queue import TrajectoryQueue

log = logging.getLogger(__name__)

SUBMIT, REFILL, SAMPLE, EVICT = _PHASES = ("submit", "refill", "sample", "evict")


def phase_of(stage: Stage) -> str:
    """Which seam of the trainer `stage` is; raises ConfigError for another than the four."""
    phase = stage.options.get("phase", SUBMIT)
    if phase not in _PHASES:
        where = f"SkipManager.annotate of {stage.name}"
        raise ConfigError(f"phase {phase!r} is unknown", where, f"use {', '.join(_PHASES)}")
    return str(phase)


def queue_of(call: Call) -> TrajectoryQueue:
    """The queue that the stage's option names; raises ConfigError if it names none."""
    queue = call.stage.options.get("queue")
    if callable(queue):
        queue = queue(*call.args, **call.kwargs)
    if queue is None:
        raise ConfigError(
            f"role {call.stage.role} does not know the queue",
            f"SkipManager.annotate of {call.stage.name}",
            "name it: annotate(..., queue=lambda self, *args, **kwargs: self.queue)",
        )
    return queue  # type: ignore[no-any-return]


def partition_of(call: Call) -> str:
    return str(call.stage.options.get("partition_id", TRAIN))


@attrs.define
class Submitted:
    """What was submitted at a step so far: batches and their refills."""

    prompts: int = 0
    #: The groups that the present visit of the step found at its first batch, and the step whose
    #: dump has them: what the visit generates serves none of its later batches. None before that.
    found: list[Group] | None = None
    source: int = -1
    served: set[Group] = attrs.field(factory=set)
    #: Whether this job generates some of it, which its dump may not have yet.
    generates: bool = False
    #: What it was submitted under besides what is hashed with each prompt; None: not known here.
    conditions: Identity | None = None

    @property
    def left(self) -> list[Group]:
        """The groups that may serve another batch."""
        return [group for group in self.found or () if group not in self.served]


class GroupDumps(Role):
    """Dumps the groups that leave a queue, each sampled batch as the next part of its step."""

    dumps: Dumps

    def __init__(self, role: str, local_config: Any, facts: HostFacts) -> None:
        super().__init__(role, local_config)
        self.dumps = Dumps(role, local_config, facts)
        self._ledger = ledger_of(self.dumps.directory)
        #: By step. What a dump of these steps lacks is still being generated.
        self._submitted: dict[int, Submitted] = {}
        # By step, what one dump has: groups, keys, and fields of rows.
        self._evicted: list[tuple[int, dict[str, Any]]] = []

    def observes(self, stage: Stage) -> bool:
        return phase_of(stage) in (SAMPLE, EVICT)

    def keep(self, call: Call, result: Any) -> None:
        """Dump the groups that left the queue with `result`."""
        phase = phase_of(call.stage)
        if phase in (SUBMIT, REFILL):
            return  # the prompts are submitted; their rollouts are generated later
        parts = self._parts_of(result[0] if isinstance(result, tuple) else result, call)
        if phase == EVICT:
            # With the next sampled batch: a dump without one would serve too few prompts.
            self._evicted += parts
            return
        total = sum(len(part["groups"]) for _, part in parts)
        for step, part in parts:
            self._dump(step, part, call, call.seconds * len(part["groups"]) / total)
        while self._evicted:  # one that cannot be dumped keeps none of the others back
            self._dump(*self._evicted.pop(0), call, 0.0)

    def _parts(self, step: int) -> dict[Key, DumpMeta]:
        """The metas of a step's parts, up to the first missing number."""
        parts: dict[Key, DumpMeta] = {}
        try:
            while meta := self.dumps.store.read_meta(step, call := part_name(len(parts))):
                parts[Key(step, call)] = meta
        except (DumpError, OSError) as error:
            text = "rlskip: step %d of role %s is not replayed: %s"
            log.warning(text, step, self.dumps.role, error)
            return {}
        return parts

    def _parts_of(self, batch: Any, call: Call) -> list[tuple[int, dict[str, Any]]]:
        """The groups of a batch that are to be dumped, by the step that submitted them."""
        queue = queue_of(call)
        uid_of_row = {key: row[0] for key in batch.keys if (row := split_trajectory(key))}
        roots = (batch.extra_info or {}).get(ROLLOUT_ROOT_KEYS) or dict.fromkeys(
            uid_of_row.values()
        )
        by_step: dict[int, list[QueuedGroup]] = {}
        for group in groups_in(queue.list(batch.partition_id), roots):
            by_step.setdefault(group.root[DUMP_STEP], []).append(group)
        parts = []
        for step, groups in by_step.items():
            uids = {group.uid for group in groups}
            keys = [key for key, uid in uid_of_row.items() if uid in uids]
            if keys:  # else these groups have no rows: nothing to replay
                fields = queue.get(keys, batch.partition_id)
                parts.append((step, {"groups": groups, "keys": keys, "fields": fields}))
        return parts

    def _dump(self, step: int, part: dict[str, Any], call: Call, seconds: float) -> None:
        """Write the next part of a step; `seconds` is its share of the sampling."""
        conditions = self.dumps.identities.conditions
        n = conditions.compared["n"]
        if (submitted := self._submitted.get(step)) and submitted.conditions:
            conditions = submitted.conditions
        first = len(self._parts(step))
        queued = [
            [root[DUMP_CONTENT], root[DUMP_POSITION], group.is_complete(part["keys"], n)]
            for group in part["groups"]
            for root in [group.root]
        ]
        about = {QUEUED: queued, "seconds": seconds, "place": first}
        store = self.dumps.store
        dump = store.prepare(
            step,
            {**part, "groups": [attrs.asdict(group) for group in part["groups"]]},
            identity=conditions,
            info={**self.dumps.info(call, part["fields"]), **about},
            sidecar=capture_rng(),
        )
        with self._ledger.lock:  # who finds the dump knows that this process wrote it
            for number in itertools.count(first):  # another job may take one meanwhile
                meta, is_own = store.write(dump.named(part_name(number)))
                if is_own:
                    break
            self._ledger.write(Key(step, meta.call))
        call.record("dumped", step=step, call=meta.call, bytes=store.size_of(meta))
