"""Trains with a genuine trainer of TRL, each as its name says; no rlskip but `attached`.

Run by the interpreter that $RLSKIP_TRL names: ``python trl_trainers_app.py JOBS RESULTS``. Both are
JSON files. A job is ``{"trainer": "RLOOTrainer", "skip": {...} or null}``; its
result is ``{"log": [...], "generated": 2, "error": null}``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

from datasets import Dataset
from transformers import GenerationMixin, set_seed
from trl_app import ARGS, logged, main, tiny_model, tokenizer

from rlskip.hosts import trl as host

WHERE = {
    "GRPOTrainer": "trl", "RLOOTrainer": "trl", "DistillationTrainer": "trl",
    "GMPOTrainer": "trl.experimental.gmpo", "SDPOTrainer": "trl.experimental.sdpo",
    "SDFTTrainer": "trl.experimental.sdft", "OnlineDPOTrainer": "trl.experimental.online_dpo",
    "GKDTrainer": "trl.experimental.gkd", "A2POTrainer": "trl.experimental.a2po",
    "SFTTrainer": "trl",
}  # fmt: skip
QUESTIONS = [f"{i} + {j} =" for i in range(4) for j in range(4)]
PROMPTS = [{"prompt": question} for question in QUESTIONS]
CHAT = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
TALK = [
    {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": "1 2"}]}
    for q in QUESTIONS
]
PRIVILEGED = [{**row, "privileged_context": "7"} for row in PROMPTS]
TAUGHT = {"GKDTrainer", "DistillationTrainer"}
UNREWARDED = {*TAUGHT, "SDFTTrainer", "SFTTrainer"}
NO_N = {*TAUGHT, "OnlineDPOTrainer", "A2POTrainer", "SFTTrainer"}


def reward(completions: Any = None, **_: Any) -> list[float]:
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [float(len(set(text.split()))) + 0.1 * len(text) for text in texts]


def make(name: str) -> Any:
    module = importlib.import_module(WHERE[name])
    config = getattr(module, name.replace("Trainer", "Config"))
    given: dict[str, Any] = {**ARGS, "max_steps": 2, "output_dir": "out"}
    if name in NO_N:
        del given["num_generations"]
    if name in ("OnlineDPOTrainer", "GKDTrainer", "SFTTrainer"):
        del given["max_completion_length"]
    if name == "SDFTTrainer":
        given["distillation_topk"] = 5
    model: Any = tiny_model()
    if name in ("RLOOTrainer", "SDFTTrainer", "SDPOTrainer"):  # load it once more
        model.save_pretrained("model")
        given["model_init_kwargs"] = {"dtype": "float32"}
        model = "model"
    more: dict[str, Any] = {}
    if name not in UNREWARDED:
        more["reward_funcs"] = reward
    if name in TAUGHT:
        more["teacher_model"] = tiny_model()
    rows = (
        TALK
        if name in ("GKDTrainer", "SFTTrainer")
        else PRIVILEGED
        if name in ("SDFTTrainer", "SDPOTrainer")
        else PROMPTS
    )
    words = tokenizer()
    words.chat_template = CHAT
    return getattr(module, name)(
        model=model, args=config(**given), train_dataset=Dataset.from_list(rows),
        processing_class=words, **more,
    )  # fmt: skip


def train(job: dict[str, Any]) -> dict[str, Any]:
    set_seed(0)
    generated = 0  # by any model, the teacher too
    generate = GenerationMixin.generate

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal generated
        generated += 1
        return generate(*args, **kwargs)

    skip = job["skip"]
    within = contextlib.nullcontext() if skip is None else host.attached({"skip": skip})
    GenerationMixin.generate = counting
    trainer, error = None, None
    try:
        with within:
            trainer = make(job["trainer"])
        trainer.train()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    finally:
        GenerationMixin.generate = generate
    log = logged(trainer) if trainer else []
    return {"log": log, "generated": generated, "error": error}


if __name__ == "__main__":
    main(train)
