"""Rollouts on a GPU: dumped from it, replayed to it, and what a replay saves TRL's GRPO there.

hold_ratio_cuda    how long the training thread waits for a dump of tensors on the device, next to
                   `torch.save` of the same TensorDict
replay_ratio_cuda  from a dump to the same tensors on the device, next to `torch.load`
grpo_step_s        seconds of a whole step of GRPO, replayed, next to generated
grpo_saved_s       seconds of a step that the replay saved

Each value that comes back is compared to the bit, dtype and device included, and so are the
metrics that the replayed and the generated GRPO log. The model of GRPO is made from its config,
without weights to load: 24 layers of 896 (0.39 billion parameters) in bfloat16.

Needs TRL (.ci/envs/trl.txt). `--device cpu --small` tries the script where no GPU is.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks._report import Goal, Row, arguments, report, versions
from rlskip import SkipManager

PROMPT, RESPONSE, VOCABULARY = 1024, 4096, 151_936


def rollouts(rows: int, device: str) -> TensorDict:
    """Return a step's rollouts, padded as an engine's, with every dtype that trainers use."""
    made = torch.Generator().manual_seed(0)
    length = torch.randint(RESPONSE // 16, RESPONSE + 1, (rows, 1), generator=made)
    mask = torch.arange(RESPONSE) < length
    ids = torch.randint(0, VOCABULARY, (rows, RESPONSE), generator=made)
    log_probs = torch.randn(rows, RESPONSE, generator=made)
    turns = [torch.randn(n, generator=made) for n in range(1, rows + 1)]
    fields = {
        "prompts": torch.randint(0, VOCABULARY, (rows, PROMPT), generator=made),
        "responses": ids * mask,
        "response_mask": mask.long(),
        "log_probs": log_probs * mask,
        "half": (log_probs * mask).to(torch.bfloat16),
        "finished": mask.any(dim=1),
        "turns": torch.nested.nested_tensor(turns, layout=torch.jagged),
    }
    return TensorDict(fields, batch_size=[rows]).to(device)


def equal(replayed: TensorDict, original: dict[str, torch.Tensor]) -> None:
    """Raise where a value differs in one bit, its dtype or its device."""
    assert set(replayed.keys()) == set(original.keys())
    for name, value in original.items():
        other = replayed[name]
        assert (other.dtype, other.device) == (value.dtype, value.device), name
        if value.is_nested:
            assert torch.equal(other.offsets(), value.offsets()), name  # type: ignore[attr-defined]
            value, other = value.values(), other.values()
        as_bytes = [tensor.contiguous().view(torch.uint8) for tensor in (other, value)]
        assert torch.equal(*as_bytes), f"{name} differs"


def timed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[float, Any]:
    """Return the wall time of a call, with what it started on the device, and its value."""
    start = time.perf_counter()
    value = function(*args, **kwargs)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, value


def dumps(rows: int, device: str, folder: Path, rounds: int = 5) -> list[Row]:
    """Measure one dump and its replay, in turns with torch's own."""
    batch = rollouts(rows, device)
    # Each tensor's own clone: TensorDict.clone makes 0.0 of -0.0 (tensordict 0.10, by foreach).
    original = {name: value.clone() for name, value in batch.items()}

    @SkipManager.annotate(role="rollout")
    def generate(prompts: list[int]) -> TensorDict:
        return batch

    role = {"enable": True, "background_write": True}  # as under Hydra
    config = {"skip": {"dump_dir": str(folder / "dumps"), "rollout": role}}
    their_file = folder / "batch.pt"
    saves, their_saves, loads, their_loads = [], [], [], []
    SkipManager.init(config)
    for step in range(1, rounds + 1):
        SkipManager.set_step(step)
        saves.append(timed(generate, [step])[0])
        SkipManager.flush()
        their_saves.append(timed(torch.save, batch, their_file)[0])
        gc.collect()
    equal(batch, original)
    batch = TensorDict({}, batch_size=[])  # What comes from here on was replayed.
    SkipManager.init(config)
    for step in range(1, rounds + 1):
        SkipManager.set_step(step)
        took, replayed = timed(generate, [step])
        equal(replayed, original)
        del replayed  # as in a training loop: the next step's finds its memory free
        loads.append(took)
        their_loads.append(timed(torch.load, their_file, weights_only=False)[0])
        gc.collect()
    SkipManager.reset()
    nbytes = sum(value.nbytes for value in original.values())
    print(f"{rows} rows, {nbytes / 1e6:.0f} MB on {device}: replayed to it, equal to the bit")
    return [
        Row(f"hold_ratio_{device}", min(saves), "s", min(their_saves), Goal("<=", 1 / 15)),
        Row(f"replay_ratio_{device}", min(loads), "s", min(their_loads)),
    ]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate([*map(str, range(1000)), "+", "=", "<pad>", "<eos>"])}
    bare = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=bare, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )


def different_words(completions: list[str], **_: Any) -> list[float]:
    return [len(set(text.split())) / 10 for text in completions]


def train(folder: Path, device: str, small: bool) -> tuple[list[dict[str, float]], float, float]:
    """Train with GRPO; returns what it logged, seconds of its rollouts, median of its steps."""
    from datasets import Dataset
    from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback, set_seed
    from trl import GRPOConfig, GRPOTrainer

    from rlskip.hosts import trl as host

    words = tokenizer()
    shape = (64, 2, 2, 128) if small else (896, 24, 14, 4864)
    hidden, layers, heads, inner = shape
    set_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(words), hidden_size=hidden, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads, intermediate_size=inner,
            bos_token_id=None, pad_token_id=words.pad_token_id, eos_token_id=words.eos_token_id,
        )
    )  # fmt: skip
    if device == "cuda":
        model = model.to(torch.bfloat16)
    generated: list[float] = []
    generate = model.generate

    def counted(*args: Any, **kwargs: Any) -> Any:
        took, value = timed(generate, *args, **kwargs)
        generated.append(took)
        return value

    model.generate = counted
    prompts = [{"prompt": f"{i} + {j} ="} for i in range(16) for j in range(16)]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=different_words,
        args=GRPOConfig(
            output_dir=str(folder / "out"), max_steps=4, logging_steps=1, save_strategy="no",
            per_device_train_batch_size=8 if small else 64, num_generations=8,
            max_completion_length=16 if small else 256, report_to=[], disable_tqdm=True,
            use_cpu=device == "cpu", bf16=device == "cuda", full_determinism=True,
        ),
        train_dataset=Dataset.from_list(prompts),
        processing_class=words,
    )  # fmt: skip
    host.attach(trainer, {"skip": {"dump_dir": str(folder / "trl"), "rollout": {"enable": True}}})
    steps: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            steps.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps[-1] = time.perf_counter() - steps[-1]

    trainer.add_callback(Clock())
    trainer.train()
    SkipManager.flush()
    times = ("time", "per_second", "runtime", "rlskip/")
    logged = [
        {key: value for key, value in line.items() if not any(word in key for word in times)}
        for line in trainer.state.log_history
    ]
    # The first step of a process starts kernels.
    return logged, sum(generated), statistics.median(steps[1:])


def grpo(folder: Path, device: str, small: bool) -> list[Row]:
    """Measure GRPO, generated and replayed."""
    logged, generated_s, step_s = train(folder, device, small)
    SkipManager.reset()
    again, replayed_generation_s, replayed_step_s = train(folder, device, small)
    SkipManager.reset()
    assert generated_s > 0
    assert replayed_generation_s == 0, "the replay generated"
    assert again == logged, f"the replay logs otherwise:\n{logged}\n{again}"
    print(f"GRPO: {len(logged)} lines of metrics equal to the bit, nothing generated")
    return [
        Row("grpo_step_s", replayed_step_s, "s", step_s),
        Row("grpo_saved_s", step_s - replayed_step_s, "s"),
    ]


def main() -> None:
    parser: argparse.ArgumentParser = arguments(__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="few rows and a tiny model")
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch's deterministic algorithms
    device = torch.cuda.get_device_name() if options.device == "cuda" else "none"
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        for measure in (
            lambda folder: dumps(16 if options.small else 1024, options.device, folder),
            lambda folder: grpo(folder, options.device, options.small),
        ):
            rows += measure(Path(temporary))
            named = versions("tensordict", "blosc2", "trl", "transformers")
            # Now: a later failure loses nothing.
            report(rows, {"gpu": device, **named}, options.json)


if __name__ == "__main__":
    main()
