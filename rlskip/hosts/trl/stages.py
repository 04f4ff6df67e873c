"""What TRL's GRPO and RLOO trainers compute, recorded for `rlskip compare`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from rlskip import stages
from rlskip.config.other_nodes import RecordConfig

#: TRL's entries by the names that all hosts share, in the order in which a step computes them.
ENTRIES = {
    "sampling_per_token_logps": "engine_log_probs",
    "old_per_token_logps": "old_log_probs",
    "ref_per_token_logps": "ref_log_probs",
    "advantages": "advantages",
}
_OF_THE_MACHINE = ("step_time", "num_tokens", "epoch", "runtime", "per_second", "total_flos",
                   "profiling/")  # fmt: skip
_RECORDING = "_rlskip_recording"  # the attribute of a trainer that is recorded


def record_stages(trainer: Any, settings: RecordConfig) -> None:
    """Record the rewards, :data:`ENTRIES`, the policy's ``log_probs`` and the logs of training."""
    known = getattr(trainer, _RECORDING, None)
    recording = known or _Recording(trainer)
    if settings.enable or known:  # else what Hydra's callback has started goes on
        stages.start(settings, lambda: recording.step)
    if known or not settings.enable:
        return
    setattr(trainer, _RECORDING, recording)
    for name in (
        "_calculate_rewards", "_generate_and_score_completions", "_compute_loss",
        "_get_per_token_logps_and_entropies", "log",
    ):  # fmt: skip
        method = getattr(trainer, name, None)
        if method is not None:
            in_its_place = getattr(recording, name.lstrip("_"))
            setattr(trainer, name, functools.partial(in_its_place, method))


class _Recording:
    """The calls of one trainer; each method has the name of the trainer's own."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._rewards: Any = None
        self._inputs: Mapping[str, Any] | None = None
        self._is_over = False

    @property
    def step(self) -> int:
        """The step as the trainer logs it, from 1: it counts a step before it logs."""
        done: int = self._trainer.state.global_step
        return done if self._is_over else done + 1

    def calculate_rewards(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        self._rewards = method(*args, **kwargs)
        return self._rewards

    def generate_and_score_completions(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        output = method(*args, **kwargs)
        if self._trainer.model.training:
            rewards = self._rewards
            # With several processes they are those of all; each records its own rows.
            if rewards is not None and len(rewards) == len(output["completion_ids"]):
                stages.record("rewards", rewards, rows=output)
            for entry, name in ENTRIES.items():
                if output.get(entry) is not None:
                    stages.record(name, output[entry], rows=output)
        return output

    def compute_loss(self, method: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._inputs = inputs
        try:
            return method(model, inputs, *args, **kwargs)
        finally:
            self._inputs = None

    def get_per_token_logps_and_entropies(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        found = method(*args, **kwargs)
        if self._inputs is not None and self._trainer.model.training:
            stages.record("log_probs", found[0], rows=self._inputs)
        return found

    def log(self, method: Any, logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        result = method(logs, *args, **kwargs)
        if self._trainer.model.training:
            self._is_over = True
            stages.record("metrics", stages.comparable(logs, _OF_THE_MACHINE))
            self._is_over = False
        return result
