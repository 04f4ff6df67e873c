"""Written by verl's own code, to be read without it: the files in this directory.

python make.py OUT torch|numpy|queue      (in an environment with verl)
"""

from __future__ import annotations

import os
import sys
import uuid
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict


def column(values: list[Any]) -> np.ndarray:
    made = np.empty(len(values), object)
    for i, value in enumerate(values):
        made[i] = value
    return made


def data_proto(out: str) -> None:
    from verl.protocol import DataProto

    random = torch.Generator().manual_seed(0)
    rows, prompt_len, response_len = 4, 6, 5
    prompts = torch.randint(5, 90, (rows, prompt_len), generator=random)
    responses = torch.randint(5, 90, (rows, response_len), generator=random)
    mask = torch.ones(rows, response_len, dtype=torch.int64)
    mask[1, 3:] = responses[1, 3:] = prompts[0, :2] = 0
    attention = torch.cat([torch.ones_like(prompts), mask], 1)
    attention[0, :2] = 0
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": attention,
        "response_mask": mask,
        "rollout_log_probs": -torch.rand(rows, response_len, generator=random),
        "rm_scores": torch.zeros(rows, response_len).index_fill(1, torch.tensor([2]), 1.0),
    }
    others = {
        "uid": column(["a", "a", "b", "b"]),
        "raw_prompt": column([[{"role": "user", "content": f"{i} + 2?"}] for i in range(rows)]),
        "multi_modal_inputs": column([{}, {"pixel_values": torch.arange(3.0)}, {}, {}]),
        "score": np.array([0.0, 1.0, 0.5, 1.0]),
        "extra_info": column([{"index": np.int64(i)} for i in range(rows)]),
    }
    meta_info = {"global_steps": 1, "timing": {"gen": np.float64(1.5)}, "metrics": [{"x": 1.0}]}
    batch = TensorDict(tensors, batch_size=[rows])
    DataProto(batch=batch, non_tensor_batch=others, meta_info=meta_info).save_to_disk(out)


def queue_batch(out: str) -> None:
    """As RolloutTqSkip.prepare_data saves what TransferQueue returned (verl 0.9.1)."""
    keys: list[str] = []
    rows: list[dict[str, Any]] = []
    # Two prompts of two sessions; the first session of the second wrote two rows.
    for prompt, session, index in ((1, 1, 0), (1, 0, 0), (2, 0, 0), (2, 0, 1), (2, 1, 0)):
        uid = str(uuid.UUID(int=prompt))
        keys.append(f"{uid}_{session}_{index}")
        length = 2 + prompt + session + index
        rows.append(
            {
                "uid": uid,
                "prompts": torch.arange(3 + prompt) + 10 * prompt,
                "responses": torch.arange(length) + 100 * session,
                "response_mask": torch.ones(length, dtype=torch.int64),
                "rm_scores": torch.full((length,), float(session)),
                "num_turns": 1 + index,
            }
        )
    fields = {
        name: torch.nested.as_nested_tensor([row[name] for row in rows], layout=torch.jagged)
        if torch.is_tensor(rows[0][name])
        else NonTensorStack(*(row[name] for row in rows))
        for name in rows[0]
    }
    tags = [{"status": "success", "global_steps": 7, "seq_len": 9 + i} for i in range(len(rows))]
    batch = TensorDict(fields, batch_size=[len(rows)])
    torch.save({"tensordict": batch, "tags": tags, "keys": keys, "global_steps": 7}, out)


if __name__ == "__main__":
    target, kind = sys.argv[1:]
    if kind == "queue":
        queue_batch(target)
    else:
        os.environ["VERL_DATAPROTO_SERIALIZATION_METHOD"] = kind
        data_proto(target)
