"""Trains a tiny model with TRL and vLLM on a CPU: ``trl_app.py JOB RESULT``, both JSON.

A job is ``{"model": ..., "trainer": "GRPOTrainer", "seed": 1, "skip": {...}, "args": {...}}``. The
result is ``{"log": [...], "vllm": true, "error": null}``; `vllm` is whether it was imported. The
harness's plug-in of vLLM writes a line to $VLLM_CPU_LOG for each engine started and each request.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
sys.path.append(os.path.join(sys.prefix, "trl_only"))  # out of the sight of verl


ARGS = {
    "output_dir": "out",
    "run_name": "vllm",
    "use_cpu": True,
    "report_to": "none",
    "bf16": False,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 16,
    "max_steps": 3,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "gradient_checkpointing": False,
    "model_init_kwargs": {"dtype": "float32"},
    "use_vllm": True,
    "vllm_max_model_length": 128,
}


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(set(ids)) / 10 + sum(ids) % 7 / 10 for ids in completion_ids]


def train(job: dict[str, Any]) -> dict[str, Any]:
    import torch
    import trl
    from datasets import Dataset

    from rlskip.hosts.trl import attached

    config = getattr(trl, job["trainer"].replace("Trainer", "Config"))(
        **{**ARGS, **job.get("args", {})}
    )
    result: dict[str, Any] = {"error": None, "log": []}
    try:
        with attached({"skip": {"rollout": {"enable": True}, **job["skip"]}}):
            trainer = getattr(trl, job["trainer"])(
                model=job["model"],
                reward_funcs=reward,
                args=config,
                train_dataset=Dataset.from_list(
                    [{"prompt": f"{i}+{2 * i + 1}="} for i in range(16)]
                ),
                eval_dataset=Dataset.from_list([{"prompt": "1+1="}] * 8),
            )
        torch.manual_seed(1000 + job["seed"])  # vLLM's sampling in this process draws from it
        trainer.train()
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
        return result
    timed = ("time", "per_second", "rlskip/")
    result["vllm"] = "vllm" in sys.modules
    result["log"] = [
        {key: value for key, value in line.items() if not any(word in key for word in timed)}
        for line in trainer.state.log_history
    ]
    return result


if __name__ == "__main__":
    job, result = map(Path, sys.argv[1:])
    result.write_text(json.dumps(train(json.loads(job.read_text()))))
