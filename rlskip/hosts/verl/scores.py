"""``skip.drop_fields=[rm_scores]``: replayed rollouts get the scores of today's reward function.

verl's agent-loop worker scores a session when it ends, which a replayed session never does. So
rlskip has such a worker's own method score it. A reward model on the rollouts' own GPUs scores what
has no scores later, and then there are no reward workers.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopMetrics,
    AgentLoopOutput,
    AgentLoopWorker,
)

from rlskip.hosts.verl.facts import SCORES
from rlskip.hosts.verl.queue import run_queue
from rlskip.keys import REPLAYED, TrajectoryKey, split_trajectory
from rlskip.queue import to_rows

_INFO = "reward_extra_info"
# Fields of a V0 rollout that are not its agent loop's.
_NOT_OF_THE_LOOP = ("__num_turns__", "multi_modal_inputs", _INFO)

#: A session: what its agent loop returned, and the fields of its prompt.
Session = tuple[list[AgentLoopOutput], dict[str, Any]]


async def _score(sessions: Sequence[Session], workers: Sequence[Any]) -> None:
    """Let verl's reward workers score sessions: the last output of each gets the score."""
    worker = object.__new__(AgentLoopWorker)
    worker.reward_loop_worker_handles, worker.processor = workers, None
    await asyncio.gather(*(worker._compute_score(*session) for session in sessions))


def _output(row: Mapping[str, Any]) -> AgentLoopOutput:
    extra = dict(row["extra_fields"])
    return AgentLoopOutput(
        prompt_ids=row["prompts"].tolist(),
        response_ids=row["responses"].tolist(),
        response_mask=[1] * len(row["responses"]),
        num_turns=int(row["num_turns"]),
        metrics=AgentLoopMetrics(),
        extra_fields={name: value for name, value in extra.items() if name != _INFO},
        mm_processor_kwargs={},
    )


async def score_rollouts(rollouts: Any, prompts: Mapping[str, Any], workers: Sequence[Any]) -> None:
    """V0: add scores to a DataProto, as ``AgentLoopWorker._postprocess`` does.

    `prompts` holds the fields of the prompts that are not tensors.
    """
    fields, tensors = rollouts.non_tensor_batch, rollouts.batch
    for name in rollouts.meta_info.pop("reward_extra_keys", []):
        fields.pop(name, None)
    others = {*_NOT_OF_THE_LOOP, *prompts} - {"raw_prompt"}
    width = tensors["prompts"].shape[1]
    mask = tensors["attention_mask"].bool()
    sessions: list[Session] = []
    for i in range(len(rollouts)):
        # A field that a loop did not return is None, because others returned it.
        extra = {n: of[i] for n, of in fields.items() if n not in others and of[i] is not None}
        row = {
            "prompts": tensors["prompts"][i][mask[i, :width]],
            "responses": tensors["responses"][i][mask[i, width:]],
            "num_turns": fields["__num_turns__"][i],
            "extra_fields": extra,
        }
        sessions.append(([_output(row)], {name: of[i] for name, of in prompts.items()}))
    await _score(sessions, workers)
    outputs = [outputs[-1] for outputs, _ in sessions]
    scores = torch.zeros_like(tensors["response_mask"], dtype=torch.float32)
    last = mask[:, width:].sum(dim=1) - 1
    scores[torch.arange(len(scores)), last] = torch.tensor([o.reward_score for o in outputs])
    tensors[SCORES] = scores
    infos = [output.extra_fields[_INFO] for output in outputs]
    fields.update({key: np.array([info[key] for info in infos]) for key in infos[0]})
    rollouts.meta_info["reward_extra_keys"] = list(infos[0])


def score_queued(uids: Sequence[str], partition: str, workers: Sequence[Any]) -> None:
    """V1: score the replayed sessions of these prompts, and write the scores to their rows.

    Does nothing if they have scores.
    """
    queue = run_queue()
    listing = queue.list(partition)
    replayed = {uid for uid in uids if REPLAYED in listing.get(uid, {})}
    keys = [key for key in listing if (row := split_trajectory(key)) and row[0] in replayed]
    if not keys:
        return
    data = queue.get(keys, partition)
    if SCORES in data.keys():  # noqa: SIM118 - a TensorDict
        return
    rows = dict(zip(map(TrajectoryKey.parse, keys), to_rows(data), strict=True))
    by_session = itertools.groupby(sorted(rows), lambda key: (key.uid, key.session_id))
    of_session = [list(its_keys) for _, its_keys in by_session]
    sessions = [
        ([_output(rows[key]) for key in its_keys], _of_prompt(rows[its_keys[-1]]))
        for its_keys in of_session
    ]
    asyncio.run(_score(sessions, workers))
    scored = {}
    for its_keys, (outputs, _) in zip(of_session, sessions, strict=True):
        for key, output in zip(its_keys, outputs, strict=True):
            scores = torch.zeros(len(output.response_ids), dtype=torch.float32)
            scores[-1] = outputs[-1].reward_score
            extra = {**output.extra_fields, _INFO: outputs[-1].extra_fields[_INFO]}
            scored[str(key)] = {SCORES: scores, "extra_fields": extra}
    queue.put(list(scored), partition, list(scored.values()))


def _of_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a row's prompt: a trajectory's own are tensors with dimensions."""
    fields = {
        name: value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
        for name, value in row.items()
    }
    return {name: value for name, value in fields.items() if not torch.is_tensor(value)}
