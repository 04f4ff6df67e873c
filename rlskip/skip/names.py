"""Names of arguments and attributes: which are compared, and which never count."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from rlskip.config.facts import NEUTRAL_WORDS, SHAPING_NAMES

#: Arguments with these names never shape a rollout, so they are not compared.
IGNORED = (
    "step", "steps", "global_step", "global_steps", "current_step", "train_step", "training_step",
    "iteration", "epoch", "batch_idx", "sample_id", "uid", "uids", "request_id", "request_ids",
    "seed", "validate", "timing", "timing_raw", "timeout", "timeout_s", "device", "devices", "rank",
    "local_rank", "world_size", "num_workers", "verbose", "debug", "disable_tqdm", "use_tqdm",
    "pbar", "progress", "progress_bar", "show_progress", "callback", "callbacks", "logger",
    "tracker", "writer", "run_name", "log_dir", "log_file", "log_path", "out_dir", "output_dir",
    "output_file", "output_path", "results_dir", "save_dir", "save_path", "checkpoint_dir",
    "dump_dir", "dump_path",
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
    """A name without underscores at its ends; whether it shapes rollouts, or is neutral."""
    bare = name.rpartition("__")[2].strip("_") if name.startswith("_") else name.rstrip("_")
    bare = bare.lower() if bare.isupper() else bare
    is_neutral = bare in IGNORED or not NEUTRAL_WORDS.isdisjoint(bare.split("_"))
    return bare, bare in SHAPING, is_neutral and bare not in SHAPING


def shaping_in(fields: Mapping[Any, Any]) -> dict[Any, Any]:
    return {name: part for name, part in fields.items() if read_name(str(name))[1]}
