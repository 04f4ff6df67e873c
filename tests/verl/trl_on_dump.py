"""TRL's GRPOTrainer takes one step on the rollouts of verl's first step, and records its stages.

Run by the interpreter that $RLSKIP_TRL names: ``python trl_on_dump.py DUMPS MODEL RECORDS``.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import rlskip
from rlskip.hosts import trl as host

dumps, model, records = sys.argv[1:]
groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
for row in rlskip.open(dumps)[0][1].iter_rows(
    ["group", "prompt", "response", "log_probs", "reward"]
):
    groups[row["group"]].append(row)
rewards = {tuple(row["response"]): row["reward"] for rows in groups.values() for row in rows}


def replay(prompts: list[str], trainer: Any) -> dict[str, Any]:
    waiting = {name: iter(rows) for name, rows in groups.items()}
    rows = [next(waiting[name]) for name in prompts]
    return {
        "prompt_ids": [row["prompt"] for row in rows],
        "completion_ids": [row["response"] for row in rows],
        "logprobs": [row["log_probs"] for row in rows],
    }


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [rewards[tuple(ids)] for ids in completion_ids]


n = len(next(iter(groups.values())))
trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager"),
    processing_class=AutoTokenizer.from_pretrained(model),
    reward_funcs=reward,
    rollout_func=replay,
    train_dataset=Dataset.from_list([{"prompt": name} for name in groups]),
    args=GRPOConfig(
        output_dir=f"{records}/out", max_steps=1, logging_steps=1, save_strategy="no", report_to=[],
        per_device_train_batch_size=n * len(groups), num_generations=n, max_completion_length=16,
        # Twice, so that the log-probs before the update are computed, too.
        num_iterations=2, shuffle_dataset=False, use_cpu=True, bf16=False, disable_tqdm=True,
    ),
)  # fmt: skip
host.attach(trainer, {"record": {"enable": True, "dump_dir": records}})
trainer.train()
