"""What SkyRL's config says of a run: its names and sizes, what shapes rollouts, its steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from rlskip.config.facts import HostFacts
from rlskip.config.skip import VALIDATION_ROLE
from rlskip.hosts.standalone_config import ROLE
from rlskip.skip.names import read_name

# Keys of `cfg.generator` that shape what a generator returns.
_SHAPING = (
    "max_turns", "append_eos_token_after_stop_str_in_multi_turn", "vision_language_generator",
    "use_conversation_multi_turn", "zero_reward_on_non_stop", "apply_overlong_filtering", "batched",
    "max_input_length", "chat_template", "chat_template_kwargs", "step_wise_trajectories",
)  # fmt: skip

# Keys of an environment that shape nothing.
_NOT_SHAPING = ("log_requests", "timeout")

# Rollouts with log-probs serve a training that needs none, so the identity leaves this out.
LOGPROBS = "logprobs"

FULLY_ASYNC = "trainer.fully_async.enabled"


def facts_of(cfg: Any) -> HostFacts:
    gym = vars(cfg.environment.skyrl_gym)
    return HostFacts(
        experiment=cfg.trainer.run_name,
        project=cfg.trainer.project_name,
        prompts=cfg.trainer.train_batch_size,
        n=cfg.generator.n_samples_per_prompt,
        prompt_len=cfg.trainer.max_prompt_length,
        response_len=cfg.generator.sampling_params.max_generate_length,
        model=cfg.trainer.policy.model.path,
        tokenizer=cfg.trainer.policy.model.path,
        engine=cfg.generator.inference_engine.backend,
        called_with={
            ROLE: compared(cfg, vars(cfg.generator.sampling_params), gym),
            VALIDATION_ROLE: compared(cfg, vars(cfg.generator.eval_sampling_params), gym),
        },
        samples_dynamically=cfg.trainer.algorithm.dynamic_sampling.type is not None,
        validates={"trainer.eval_interval": -1} if cfg.trainer.eval_interval > 0 else {},
        experiment_key="trainer.run_name",
    )


def steps_of(trainer: Any) -> tuple[Sequence[int], Sequence[int]]:
    """The steps that a trainer will take and those at which it evaluates, where they are known."""
    cfg, total = trainer.cfg.trainer, getattr(trainer, "total_training_steps", None)
    if total is None or (done := _steps_done(cfg)) is None:
        return (), ()
    steps, every = range(done + 1, total + 1), cfg.eval_interval
    evaluated = [done] if every > 0 and cfg.eval_before_train else []
    evaluated += [s for s in steps if every > 0 and (s % every == 0 or s == total)]
    return steps, evaluated


def _steps_done(trainer: Any) -> int | None:
    """The step of the checkpoint that a run resumes from; 0 without one, None if not known."""
    if trainer.resume_mode in (None, "none"):
        return 0
    if trainer.resume_mode != "latest" or "://" in trainer.ckpt_path:
        return None
    latest = Path(trainer.ckpt_path, "latest_ckpt_global_step.txt")
    return int(latest.read_text(encoding="utf-8")) if latest.exists() else 0


def compared(cfg: Any, sampling: Mapping[str, Any], gym: Collection[str]) -> dict[str, Any]:
    """What `cfg`, a call's sampling and its environments, those of `gym`, add to its identity."""
    # What SkyRL's own class does not declare, a class of the user's has added.
    own, kinds = vars(cfg.generator), type(cfg.generator).__mro__
    theirs = next((cls for cls in kinds if cls.__module__.startswith("skyrl.")), kinds[0])
    added = sorted(own.keys() - {field.name for field in fields(theirs)})
    names = (*_SHAPING, *(name for name in added if not read_name(name)[2]))
    shaping = {name: own.get(name) for name in names}
    shaping |= {f"environment.{one}": getattr(cfg.environment.skyrl_gym, one, None) for one in gym}
    for name, value in shaping.items():
        if is_dataclass(value):
            shaping[name] = {k: vars(value)[k] for k in vars(value) if k not in _NOT_SHAPING}
    sampled = {name: sampling[name] for name in sampling if name != LOGPROBS}
    return {**{name: value for name, value in shaping.items() if value is not None}, **sampled}
