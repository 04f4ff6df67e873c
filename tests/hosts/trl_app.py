"""Trains a tiny GRPO model with the genuine TRL, as often as it is told; no rlskip but `attach`.

Run by the interpreter that $RLSKIP_TRL names: ``python trl_app.py JOBS RESULTS``. Both are JSON
files. A job is ``{"args": {...}, "skip": {...} or null, "installed": ..., ...}``; "record" is that
node, "plant" names a bug to plant, "attributes" are
set on the trainer, for example ``use_vllm`` where no vLLM is installed. Its result is
``{"log": [...], "generated": {"train": 4, "eval": 0}, "rewarded": 4, "seen": [[prompt,
completion], ...], "error": null}``.
Under ``accelerate launch`` every rank writes RESULTS with its rank appended.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer

from rlskip import SkipManager
from rlskip.hosts import trl as host

WORDS = [*map(str, range(20)), "+", "=", "<pad>", "<eos>"]
ARGS = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 8,
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
}


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate(WORDS)}
    bare = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=bare, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )


def tiny_model(**more: Any) -> Qwen2ForCausalLM:
    config = {
        "vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "bos_token_id": None, "pad_token_id": WORDS.index("<pad>"),
        "eos_token_id": WORDS.index("<eos>"),
        "attention_dropout": 0.1,  # another consumer of the global generators
    }  # fmt: skip
    return Qwen2ForCausalLM(Qwen2Config(**{**config, **more}))


def logged(trainer: Any) -> list[dict[str, Any]]:
    """What a trainer has logged, without times and what was replayed."""
    timed = ("time", "per_second", "rlskip/")
    return [
        {key: value for key, value in line.items() if not any(word in key for word in timed)}
        for line in trainer.state.log_history
    ]


def plant(trainer: GRPOTrainer, bug: str | None) -> None:
    """Change what a method of the trainer returns."""
    score = trainer._generate_and_score_completions
    log_probs = trainer._get_per_token_logps_and_entropies

    def other_advantages(*args: Any) -> Any:
        output = score(*args)
        return {**output, "advantages": output["advantages"] / 2}

    def with_a_nan(*args: Any, **kwargs: Any) -> Any:
        values, *more = log_probs(*args, **kwargs)
        if trainer.state.global_step == 1 and values.requires_grad and not done:
            done.append(True)
            values = values.clone()
            values[2, 3] = torch.nan
        return values, *more

    done: list[bool] = []
    if bug == "advantages":
        trainer._generate_and_score_completions = other_advantages
    elif bug == "nan":
        trainer._get_per_token_logps_and_entropies = with_a_nan


def train(job: dict[str, Any]) -> dict[str, Any]:
    set_seed(job.get("seed", 0))
    model = tiny_model()
    generated = {"train": 0, "eval": 0}
    rewarded, seen = 0, list[tuple[str, str]]()
    generate = model.generate

    def counting(*args: Any, **kwargs: Any) -> Any:
        generated["train" if trainer.model.training else "eval"] += 1
        return generate(*args, **kwargs)

    model.generate = counting

    def different_words(prompts: Any, completions: Any, log_metric: Any = None, **_: Any) -> Any:
        nonlocal rewarded
        rewarded += 1
        seen.extend(zip(prompts, completions, strict=True))
        if log_metric:
            log_metric("my_metric", float(len(completions)))
        return [float(len(set(text.split()))) for text in completions]

    def length(prompts: Any, completions: Any, **_: Any) -> Any:
        return [float(len(text)) for text in completions]

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        """A sampler that returns a further field for the reward function."""
        generated["train" if trainer.model.training else "eval"] += 1
        tokens = torch.randint(20, (len(prompts), 5))
        return {
            "prompt_ids": trainer.processing_class(prompts)["input_ids"],
            "completion_ids": tokens.tolist(),
            "logprobs": torch.rand(len(prompts), 5, dtype=torch.float64).log().tolist(),
            "first": tokens[:, 0].tolist(),
        }

    def first_token(first: list[int], **_: Any) -> Any:
        return [float(token) for token in first]

    rewards = {"length": length, "first_token": first_token}
    more = {"rollout_func": rollout} if job.get("rollout_func") else {}
    data = Dataset.from_list([{"prompt": f"{i} + {j} ="} for i in range(4) for j in range(4)])
    args = {**ARGS, "output_dir": "out", **job.get("args", {})}
    resume = args.pop("resume_from_checkpoint", None)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=rewards.get(job.get("reward"), different_words),
        args=GRPOConfig(**args),
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer(),
        **more,
    )
    for name, value in job.get("attributes", {}).items():
        setattr(trainer, name, value)
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
        trainer._last_loaded_step = -1
    plant(trainer, job.get("plant"))
    result: dict[str, Any] = {"error": None}
    try:
        if job.get("installed"):
            SkipManager.init({"skip": job["skip"]})
            host.attach(trainer)
        elif "skip" in job:
            named = {name: job[name] for name in ("skip", "record") if job.get(name)}
            host.attach(trainer, named or None)
        trainer.train(resume_from_checkpoint=resume)
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    return {
        **result, "log": logged(trainer), "generated": generated, "rewarded": rewarded,
        "seen": seen,
    }  # fmt: skip


def main(train: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Run the jobs of the command line."""
    jobs, results = map(Path, sys.argv[1:])
    done = {name: train(job) for name, job in json.loads(jobs.read_text()).items()}
    rank = os.environ.get("RANK", "")
    Path(f"{results}{rank}").write_text(json.dumps(done))
    if rank:
        # Past the interpreter's end: there torch aborts now and then (SIGABRT from a thread of
        # gloo's), in 8 of 130 processes that did nothing but all_reduce.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main(train)
