"""V1 under ``skip.drop_fields=[rm_scores]``: score replayed rows with today's reward function.

The seam is the method ``compute_score`` of verl's reward workers. In the V1 trainer an agent-loop
worker calls it when a session ends, which a replayed session never does; so rlskip calls it with
what the agent-loop worker would have sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch
from tensordict import TensorDict
from verl.protocol import DataProto

from rlskip.hosts.verl.names import SCORES
from rlskip.hosts.verl.run_queue import run_queue
from rlskip.keys import REPLAYED, TrajectoryKey, split_trajectory
from rlskip.queue import to_rows

_INFO = "reward_extra_info"
# The fields that the reward workers get as tensors; the mask is all ones.
_TENSORS = ("prompts", "responses", "input_ids", "position_ids")


def score_replayed(uids: Sequence[str], workers: Sequence[Any], partition: str) -> None:
    """Score the replayed sessions of these prompts and write the scores to their rows.

    Does nothing if they have scores. `workers` are verl's reward workers, Ray actors with a method
    ``compute_score``.
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
    sessions = [
        {key: rows[key] for key in keys}
        for _, keys in itertools.groupby(sorted(rows), lambda key: (key.uid, key.session_id))
    ]
    results = ray.get(
        [
            worker.compute_score.remote(_as_sent(list(session.values())))
            for worker, session in zip(itertools.cycle(workers), sessions)
        ]
    )
    scored = {
        str(key): _scored(row, result)
        for session, result in zip(sessions, results, strict=True)
        for key, row in session.items()
    }
    queue.put(list(scored), partition, list(scored.values()))


def _as_sent(rows: list[dict[str, Any]]) -> DataProto:
    """One session, as ``AgentLoopWorker._compute_score`` sends it."""
    tensors: dict[str, Any] = {name: [row[name] for row in rows] for name in _TENSORS}
    tensors["attention_mask"] = [torch.ones_like(ids) for ids in tensors["input_ids"]]
    padded = {
        name: torch.nn.utils.rnn.pad_sequence(values, batch_first=True)
        for name, values in tensors.items()
    }
    fields = {name: _plain(value) for name, value in rows[-1].items()}
    return DataProto(
        batch=TensorDict(padded, batch_size=len(rows)),
        non_tensor_batch={
            # The fields of the prompt: a trajectory's own are tensors.
            **{k: np.array([v] * len(rows)) for k, v in fields.items() if not torch.is_tensor(v)},
            "__num_turns__": np.array([int(row["num_turns"]) for row in rows]),
            "tool_extra_fields": np.array([_before_scores(row) for row in rows], dtype=object),
            "prompt_len": np.array([len(row["prompts"]) for row in rows]),
            "response_len": np.array([len(row["responses"]) for row in rows]),
        },
    )


def _scored(row: dict[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """The fields to write to a row: the session's score at the last token, as verl writes it."""
    scores = torch.zeros(len(row["responses"]), dtype=torch.float32)
    scores[-1] = result["reward_score"]
    return {
        SCORES: scores,
        "extra_fields": {**_before_scores(row), _INFO: dict(result.get(_INFO, {}))},
    }


def _before_scores(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in dict(row["extra_fields"]).items() if k != _INFO}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
