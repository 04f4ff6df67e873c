"""What verl says of itself and of a run: releases, keys, steps, what rollouts need."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from rlskip._wrap import version_of
from rlskip.config.check import look_up
from rlskip.config.facts import TOTAL_STEPS, HostFacts
from rlskip.errors import ConfigError

_OLDEST = (0, 9)  # it loads plug-ins

#: Keys of the V1 trainer.
MODE_KEY = "trainer.v1.trainer_mode"
SAMPLER_KEY = "trainer.v1.sampler"
FILTER_KEY = "algorithm.filter_groups.enable"

#: The field of a row that holds its rewards, token by token.
SCORES = "rm_scores"

# A key that makes verl validate, whether a value of it does so, and the value that does not.
_VALIDATES = (
    ("trainer.val_before_train", lambda value: value is not False, "False"),
    ("trainer.test_freq", lambda value: (value or 0) > 0, "-1"),
    ("trainer.val_only", bool, "False"),
)
# A key that is on -> the fields that the trainer then needs.
NEEDED = {
    "actor_rollout_ref.rollout.calculate_log_probs": ("rollout_log_probs",),
    "actor_rollout_ref.rollout.enable_rollout_routing_replay": ("routed_experts",),
    "distillation.enabled": ("teacher_ids", "teacher_logprobs"),
}
# Seconds in the metrics of a session.
_TIMES = ("generate_sequences", "tool_calls", "compute_score")


def verl_release() -> str:
    """The installed release, for example 0.9.1; 0 if it is unknown."""
    return version_of("verl") or "0"


def is_old_release() -> bool:
    return tuple(map(int, verl_release().split("."))) < _OLDEST


def refuse_old_release() -> None:
    """Raise :class:`ConfigError` for a verl before the supported release; a newer one is tried."""
    if is_old_release():
        raise ConfigError(
            f"verl {verl_release()} loads no plug-ins and would train without skipping",
            "skip",
            "pip install 'verl>=0.9'; or, if a program of your own generates in "
            "its own process, name each function: skip.attach.ROLE=package.module:function",
        )


def is_verls(config: Any) -> bool:
    """Whether `config` looks like the config of one of verl's applications."""
    parts = ("actor_rollout_ref", "ray_kwargs", "trainer")
    return all(look_up(config, part) is not None for part in parts)


def rows_of(batch: Any, fields: Sequence[str]) -> Any:
    """Those `fields` of a sampled batch that its rows have."""
    import transfer_queue as tq

    return tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=[*fields]
    )


def without_times(rollouts: Any) -> Any:
    """A replayed DataProto, in place, without times: the trainer would log them as its own."""
    meta = rollouts.meta_info
    if "timing" in meta:
        meta["timing"] = {}
    for session in meta.get("metrics", ()):
        session.update(dict.fromkeys(session.keys() & _TIMES, 0.0))
    return rollouts


def with_steps(facts: HostFacts, total: int | None, per_epoch: int | None) -> HostFacts:
    """The facts of a run with the steps that it will take: those after its checkpoint.

    `total` is verl's last step (None: that of the config); epochs of `per_epoch` may end before.
    """
    config = facts.config
    total, first = total or look_up(config, TOTAL_STEPS) or 0, _first_step(config)
    epochs = look_up(config, "trainer.total_epochs")
    end = total if None in (epochs, per_epoch) else min(total, epochs * per_epoch)
    steps = range(0) if look_up(config, "trainer.val_only") else range(first, end + 1)
    # verl validates at what it takes for the last step, and not at that of the epochs.
    every = look_up(config, "trainer.test_freq") or 0
    validated = [s for s in steps if every > 0 and (s % every == 0 or s == total)]
    if look_up(config, "trainer.val_before_train") is not False:
        validated.insert(0, first - 1)
    return attrs.evolve(
        facts,
        steps=steps,
        validated=validated,
        validates={key: off for key, does, off in _VALIDATES if does(look_up(config, key))},
    )


def _first_step(config: Any) -> int:
    """The step after the checkpoint that verl will load; 1 without one."""
    mode = look_up(config, "trainer.resume_mode")
    if mode == "resume_path":
        found = re.search(r"global_step_(\d+)/*$", str(look_up(config, "trainer.resume_from_path")))
        return int(found[1]) + 1 if found else 1
    folder = look_up(config, "trainer.default_local_dir")
    try:
        latest = Path(folder or "", "latest_checkpointed_iteration.txt")
        return int(latest.read_text(encoding="utf-8")) + 1 if mode == "auto" else 1
    except (OSError, ValueError):
        return 1
