"""Names of keys, arguments and attributes: which are compared, and which never count."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

# Names by which any application calls what shapes a rollout: the last names of a key.
SHAPING_NAMES = (
    "temperature", "top_p", "top_k", "min_p", "do_sample", "n", "num_generations",
    "num_return_sequences", "max_tokens", "max_new_tokens", "stop", "stop_token_ids",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "length_penalty", "typical_p",
    "min_tokens", "min_new_tokens", "num_beams", "logit_bias", "bad_words", "ignore_eos",
    "model.path", "model.name", "model_path", "model_name", "model_name_or_path",
)  # fmt: skip

# What the last name of other keys looks like, for which only a change of the config is warned. A
# global of such a name that a stage reads is said to be left.
SHAPING_PATTERNS = (
    "model*", "base_model*", "pretrained*", "*adapter*", "lora_path*", "tokenizer*", "max_len*",
    "system*prompt*", "prompt_prefix", "prompt_suffix", "*template*", "*instruction*", "group*",
    "stop_words*", "stop_str*", "stop_seq*", "*temperature*", "max_*len*", "max_*tokens*",
    "max_turns", "num_samples*", "n_samples*", "*samples_per_prompt", "*thinking*", "logprobs_mode",
)  # fmt: skip
# What such a name may hold that concerns training, and how fast it is.
_OF_TRAINING = ("dtype", "parallel", "per_gpu")

# Words by which attributes are named that shape no rollout, so that none is said to be left.
NEUTRAL_WORDS = frozenset(
    ("accelerator", "callback", "callbacks", "checkpoint", "checkpoints", "ckpt", "counter",
     "dir", "directory", "elapsed", "epoch", "epochs", "folder", "grad", "history", "log",
     "logger", "logs", "loss", "losses", "lr", "metric", "metrics", "optimizer", "pbar",
     "progress", "save", "step", "steps", "timer", "timings", "wandb")
)  # fmt: skip
# Nodes of what generates no rollouts of training, where the same names mean something else.
OTHER_NODES = frozenset(
    ("critic", "reward", "reward_model", "judge", "teacher", "ref", "val", "validation", "eval",
     "logger", "logging", "wandb", "mlflow", "optimizer")
)  # fmt: skip

#: Arguments with these names never shape a rollout, so they are not compared.
IGNORED = (
    "step", "steps", "global_step", "global_steps", "current_step", "train_step", "training_step",
    "iteration", "epoch", "batch_idx", "sample_id", "uid", "uids", "request_id", "request_ids",
    "timestamp", "created_at", "updated_at", "start_time", "seed", "validate", "timing",
    "timing_raw", "timeout", "timeout_s", "device", "devices", "rank", "local_rank", "world_size",
    "num_workers", "verbose", "debug", "disable_tqdm", "use_tqdm", "pbar", "progress",
    "progress_bar", "show_progress", "callback", "callbacks", "logger", "tracker", "writer",
    "run_name", "log_dir", "log_file", "log_path", "out_dir", "output_dir", "output_file",
    "output_path", "results_dir", "save_dir", "save_path", "checkpoint_dir", "dump_dir",
    "dump_path",
)  # fmt: skip

#: What a batch's `meta_info` holds that shapes no rollout. All else in it is compared.
NEUTRAL_META = (
    *IGNORED, "eos_token_id", "pad_token_id", "recompute_log_prob", "calculate_entropy", "metrics",
    "micro_batch_size", "max_token_len", "use_dynamic_bsz", "dp_size", "global_token_num",
    "is_last_step", "training_phase", "reward_extra_keys",
)  # fmt: skip

#: All names, in ``annotate(ignore=...)``.
ALL = "*"

#: The names of what a method belongs to.
SELF = ("self", "cls")

SHAPING = frozenset(SHAPING_NAMES)


@functools.lru_cache(1 << 14)
def read_name(name: str) -> tuple[str, bool, bool]:
    """The last of dotted names without underscores at its ends.

    And whether it shapes rollouts, or is neutral.
    """
    above, _, last = name.rpartition(".")
    bare = last.rpartition("__")[2].strip("_") if last.startswith("_") else last.rstrip("_")
    bare = bare.lower() if bare.isupper() else bare
    shapes = bare in SHAPING or bool(above and f"{read_name(above)[0]}.{bare}" in SHAPING)
    is_neutral = bare in IGNORED or not NEUTRAL_WORDS.isdisjoint(bare.split("_"))
    return bare, shapes, is_neutral and not shapes


def shaping_in(fields: Mapping[Any, Any]) -> dict[Any, Any]:
    return {name: part for name, part in fields.items() if read_name(str(name))[1]}


@functools.lru_cache(1 << 12)
def seems_to_shape(key: str) -> bool:
    """Whether a key shapes rollouts by its name."""
    *nodes, last = key.split(".")
    named = f".{key}".endswith(tuple(f".{name}" for name in SHAPING_NAMES))
    if not named and not any(word in last.lower() for word in _OF_TRAINING):
        named = any(fnmatchcase(last.lower(), pattern) for pattern in SHAPING_PATTERNS)
    return named and OTHER_NODES.isdisjoint([*nodes, last])
