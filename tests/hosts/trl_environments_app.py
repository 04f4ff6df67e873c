"""Trains TRL's genuine GRPOTrainer with environments, whose tools a tiny model calls.

Run by the interpreter that $RLSKIP_TRL names: ``python trl_environments_app.py JOBS RESULTS``. Both
are JSON files. A job is ``{"reward": "completions", "several": false, "swapped": false, "level": 0,
"skip": {...} or null}``; its result is ``{"log": [...], "generated": 32, "called": 16, "error":
null}``. The first turn of each session is a scripted call of a tool with a random argument; the
model itself samples the rest.
"""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, set_seed
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template
from trl_app import ARGS, logged, main, tiny_model

from rlskip.hosts import trl as host

PAD, START, END = range(3)
SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>"]
WORDS = [*SPECIAL, "\n", *map(chr, range(32, 127))]
called = 0


class Guess:
    """Holds a number that is to be guessed."""

    def reset(self, number: int, **_: Any) -> str:
        self.number, self.solved = number, False
        return f" It is below {number + 10}."

    def guess(self, number: int) -> str:
        """
        Compare a guess with the number.

        Args:
            number: The guess.
        """
        global called
        called += 1
        self.solved = number == self.number
        return "right" if self.solved else "higher" if number < self.number else "lower"


class Loud(Guess):
    """A second kind of environment."""


class Owned(Guess):
    """Scores its own session."""

    def get_reward(self) -> float:
        return float(self.solved)


def completions(completions: Any, **_: Any) -> list[float]:
    """From what the tools answered, and a bit from the text."""
    answers = [[m["content"] for m in turns if m["role"] == "tool"] for turns in completions]
    texts = ["".join(m.get("content") or "" for m in turns) for turns in completions]
    return [len(said) + len(set(text)) / 10 for said, text in zip(answers, texts, strict=True)]


def takes(environments: Any, **_: Any) -> list[float]:
    return [float(made.solved) for made in environments]


def reads(**given: Any) -> list[float]:
    return [float(made.solved) for made in given["environments"]]


def tokenizer() -> PreTrainedTokenizerFast:
    bare = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    bare.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    bare.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=bare, pad_token="<pad>", eos_token="<|im_end|>", unk_token="<pad>",
        additional_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    made.chat_template = qwen3_chat_template
    return made


def train(job: dict[str, Any]) -> dict[str, Any]:
    global called
    set_seed(0)
    called = generated = 0
    words = tokenizer()
    actor = tiny_model(
        vocab_size=len(WORDS), num_hidden_layers=1, pad_token_id=PAD, eos_token_id=END,
        attention_dropout=0.0,
    )  # fmt: skip
    sample = actor.generate

    def generate(input_ids: Any = None, **kwargs: Any) -> Any:
        """Call a tool in a session's first turn, else let the model sample."""
        nonlocal generated
        generated += len(input_ids)
        if any("<tool_response>" in words.decode(row) for row in input_ids):
            return sample(input_ids=input_ids, **kwargs)
        numbers = torch.randint(10, (len(input_ids),)).tolist()
        calls = [{"name": "guess", "arguments": {"number": number}} for number in numbers]
        texts = [f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>" for call in calls]
        turns = torch.tensor([words(text)["input_ids"] for text in texts])
        return torch.cat([input_ids, turns.to(input_ids.device)], dim=1)

    actor.generate = generate
    hidden = {"level": job.get("level", 0)}  # `reset` takes it, and no prompt shows it
    rows: list[dict[str, Any]] = [
        {"prompt": [{"role": "user", "content": f"Guess {i}."}], "number": i, **hidden}
        for i in range(10)
    ]
    factory: Any = {"owned": Owned}.get(job["reward"], Guess)
    if job.get("several"):
        factory = {"guess": Guess, "loud": Loud}
        names = ["loud", "guess"] if job.get("swapped") else ["guess", "loud"]
        rows = [{**row, "environment": names[i % 2]} for i, row in enumerate(rows)]
    result: dict[str, Any] = {"error": None, "log": []}
    trainer = GRPOTrainer(
        model=actor,
        reward_funcs={"takes": [takes, completions], "reads": [reads]}.get(
            job["reward"], [completions]
        ),
        args=GRPOConfig(
            **{**ARGS, "max_steps": 2, "max_completion_length": 200, "output_dir": "out"}
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=words,
        environment_factory=factory,
    )
    try:
        if job["skip"]:
            host.attach(trainer, {"skip": job["skip"]})
        trainer.train()
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    return {**result, "log": logged(trainer), "generated": generated, "called": called}


if __name__ == "__main__":
    main(train)
