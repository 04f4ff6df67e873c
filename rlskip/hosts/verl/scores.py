"""``skip.drop_fields=[rm_scores]``: replayed rollouts get the scores of today's reward function.

verl scores a session when it ends, which a replayed one never does. So its reward workers are asked
as where a reward model shares the rollouts' GPUs, and told what they are told of a session's end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence
from verl import DataProto

from rlskip.batch.columns import objects_of
from rlskip.hosts.verl.facts import SCORES
from rlskip.hosts.verl.queue import run_queue
from rlskip.keys import REPLAYED, TrajectoryKey, split_trajectory
from rlskip.queue import to_rows

_INFO = "reward_extra_info"
# Fields of a V0 rollout that are not its agent loop's.
_NOT_OF_THE_LOOP = ("__num_turns__", "multi_modal_inputs", _INFO)


def _scored(
    manager: Any, tensors: Any, prompts: Mapping[str, Any], turns: Any, told: Sequence[Any]
) -> DataProto:
    """The scores of sessions, and what else the reward function returned."""
    fields = {**prompts, "__num_turns__": turns, "tool_extra_fields": objects_of(told)}
    scored = manager.compute_rm_score(DataProto(tensors, fields))
    if (model := manager.reward_model_manager) is not None:
        model.wake_up()  # it has GPUs of its own, and scores sessions that are generated
    return scored


def score_rollouts(rollouts: Any, prompts: Mapping[str, Any], manager: Any) -> None:
    """V0: add scores to a DataProto. `prompts` has the fields of its prompts, without tensors."""
    fields = rollouts.non_tensor_batch
    for name in rollouts.meta_info.pop("reward_extra_keys", []):
        fields.pop(name, None)
    others = {*_NOT_OF_THE_LOOP, *prompts} - {"raw_prompt"}
    # A field that a loop did not return is None, because others returned it.
    told = [
        {name: of[i] for name, of in fields.items() if name not in others and of[i] is not None}
        for i in range(len(rollouts))
    ]
    scored = _scored(manager, rollouts.batch, prompts, fields["__num_turns__"], told)
    rollouts.batch[SCORES] = scored.batch[SCORES]
    fields.update(scored.non_tensor_batch)
    rollouts.meta_info.update(scored.meta_info)


def score_queued(uids: Sequence[str], partition: str, manager: Any) -> None:
    """V1: score replayed sessions without scores by their last rows; all their rows get these."""
    queue = run_queue()
    listing = queue.list(partition)
    replayed = {uid for uid in uids if REPLAYED in listing.get(uid, {})}
    keys = [k for k in listing if (parts := split_trajectory(k)) and parts[0] in replayed]
    if not keys:
        return
    data = queue.get(keys, partition)
    if SCORES in data.keys():  # noqa: SIM118 - a TensorDict
        return
    rows = dict(zip(map(TrajectoryKey.parse, keys), to_rows(data), strict=True))
    last = {(key.uid, key.session_id): rows[key] for key in sorted(rows)}
    told = [{k: v for k, v in row["extra_fields"].items() if k != _INFO} for row in last.values()]
    turns = np.array([int(row["num_turns"]) for row in last.values()])
    scored = _scored(manager, *_sessions([*last.values()]), turns, told)
    totals = dict(zip(last, scored.batch[SCORES].sum(dim=1), strict=True))
    columns = {key: of.tolist() for key, of in scored.non_tensor_batch.items()}
    infos = {session: {k: of[i] for k, of in columns.items()} for i, session in enumerate(last)}
    written = {}
    for name, row in rows.items():
        session = name.uid, name.session_id
        scores = torch.zeros(len(row["responses"]), dtype=torch.float32)
        scores[-1] = totals[session]
        extra = {**row["extra_fields"], _INFO: infos[session]}
        written[str(name)] = {SCORES: scores, "extra_fields": extra}
    queue.put(list(written), partition, list(written.values()))


def _sessions(rows: Sequence[Mapping[str, Any]]) -> tuple[TensorDict, dict[str, Any]]:
    """The padded tokens of rows, and the fields of their prompts: their own are tensors."""
    tensors, masks = {}, []
    for name in ("prompts", "responses"):
        tokens = [row[name] for row in rows]
        tensors[name] = pad_sequence(tokens, batch_first=True)
        masks.append(pad_sequence([torch.ones_like(t) for t in tokens], batch_first=True))
    tensors["attention_mask"] = torch.cat(masks, dim=1)
    prompts = {}
    for name, first in rows[0].items():
        if not torch.is_tensor(first) or first.dim() == 0:
            values = [row[name] for row in rows]
            prompts[name] = objects_of([v.item() if torch.is_tensor(v) else v for v in values])
    return TensorDict(tensors, batch_size=len(rows)), prompts
