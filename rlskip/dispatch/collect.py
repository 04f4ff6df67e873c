"""What ``collect`` does with groups: it takes them, and makes one batch of their rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rlskip.dispatch.batch import Group, Held
from rlskip.keys import trajectory_key
from rlskip.queue import IncompleteRolloutError
from rlskip.queue.readiness import State
from rlskip.queue.rows import one_batch
from rlskip.queue.sampling import SampleCall


def take(held: Held, call: SampleCall, check: Callable[[], object]) -> list[Group]:
    """Wait for the groups of a call and take them; `check` raises what ends the wait before."""
    some = call.batch_size is not None
    with held.changed:
        held.waiting_for_some += some
        try:
            while True:
                check()
                if (groups := _choose(held, call)) is not None:
                    held.take(call.partition.name, groups)
                    return groups
                held.changed.wait(call.check_time(time.monotonic()))
        finally:
            held.waiting_for_some -= some


def _choose(held: Held, call: SampleCall) -> list[Group] | None:
    """The groups to return, or None to go on waiting; those that are dropped are given up."""
    if call.batch_size is None and call.groups(State.RUNNING):
        return None  # an error names all that are incomplete
    try:
        dropped = call.decide()
    except IncompleteRolloutError as error:  # which has them
        bad = [call.partition.find(prompt.uid) for prompt in error.prompts]
        held.take(call.partition.name, bad)
        raise
    if dropped is not None:
        held.take(call.partition.name, dropped.groups)
        call.evicted(dropped)
    return call.choose()


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
