"""TRL: `GRPOTrainer._generate` becomes the stage `rollout`.

That is the seam below which everything is sampled (model.generate, vLLM, a `rollout_func`, the
tool loop) and above which everything is computed anew: rewards and their logs, advantages, losses.
`_generate_and_score_completions`, one floor up, would replay the rewards too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from rlskip.config.skip import skip_node
from rlskip.errors import ConfigError
from rlskip.hosts.attach import AttachError, install
from rlskip.hosts.source import host_config, is_on, read_config
from rlskip.skip.manager import SkipManager

ROLE = "rollout"

# What of the trainer's arguments decides how completions are sampled. The seed is not among
# them: another draw from the same distribution is as good a sample.
_SAMPLING = (
    "num_generations",
    "max_completion_length",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "generation_kwargs",
    "chat_template_kwargs",
    "max_tool_calling_iterations",
)


def attach(trainer: Any, config: Any = None) -> None:
    """Skip the generation of a ``GRPOTrainer`` (or ``RLOOTrainer``); call it before ``train()``.

    Steps are numbered from 1, as the trainer logs them. With ``steps_per_generation`` below
    ``gradient_accumulation_steps`` a step generates several times: then they number generations.
    Evaluation is never skipped. ``skip.restore_rng`` is true unless the config says otherwise,
    because the trainer shuffles what it generated with the global generators.

    Parameters
    ----------
    trainer
        The trainer; nothing but this object is changed.
    config
        A mapping or DictConfig with a `skip` entry, a SkipManagerConfig, or the path of such a
        YAML file. None: the file that the environment variable ``RLSKIP_CONFIG`` names; without
        one, what is installed already (``+skip=...`` under Hydra).

    Raises
    ------
    ConfigError
        Names every problem of the `skip` node, a role that the trainer never asks among them; or
        the trainer has environments, whose state the rewards read and a replay does not bring
        back.
    AttachError
        The trainer is of a version without that seam.
    """
    config = read_config(config)
    if config is not None:
        install(_full_config(config, trainer))
    if not is_on(ROLE, config, "TRL's trainer"):
        return
    _check(trainer)
    _restore_rng_by_default()
    if not isinstance(trainer._generate, _Generation):  # else this is not the first call
        trainer._generate = _Generation(trainer, trainer._generate)


@attrs.define(eq=False)
class _Generation:
    """Stands in for the trainer's `_generate`."""

    trainer: Any
    generate: Callable[..., Any]
    _stage: Callable[..., Any] = attrs.field(init=False)
    #: The state and its global_step at the last call, and how many calls it had before.
    _at: tuple[Any, int] = attrs.field(init=False, default=(None, -1))
    _nth: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self._stage = SkipManager.annotate(
            role=ROLE, prompts=lambda prompts, *rest: prompts, identity=self._sampling
        )(self._generate_and_record)

    def __call__(self, *args: Any) -> Any:
        if not self.trainer.model.training:
            return self.generate(*args)
        SkipManager.set_step(self._next_step())
        done = self._stage(*args)
        # Generated or replayed: the same way into the logs.
        state, metrics = self.trainer.state, self.trainer._metrics["train"]
        state.num_input_tokens_seen += done["num_tokens"]
        metrics["num_tokens"] = [state.num_input_tokens_seen]
        for name, values in done["metrics"].items():
            metrics[name] += values
        return done["output"]

    def _generate_and_record(self, *args: Any) -> dict[str, Any]:
        """What the trainer's own method returns, and what it would have left in the trainer."""
        state, metrics = self.trainer.state, self.trainer._metrics
        logged, seen = metrics["train"], state.num_input_tokens_seen
        own: dict[str, list[float]] = defaultdict(list)
        metrics["train"] = own
        try:
            output = self.generate(*args)
            num_tokens = state.num_input_tokens_seen - seen
        finally:
            metrics["train"], state.num_input_tokens_seen = logged, seen
        own.pop("num_tokens", None)  # the sum so far, not what this call adds
        return {"output": output, "metrics": dict(own), "num_tokens": num_tokens}

    def _next_step(self) -> int:
        state, args = self.trainer.state, self.trainer.args
        last_state, last_step = self._at
        again = state is last_state and state.global_step == last_step
        self._nth = self._nth + 1 if again else 0
        self._at = (state, state.global_step)
        calls_a_step: int = math.ceil(args.gradient_accumulation_steps / args.steps_per_generation)
        step: int = state.global_step * calls_a_step + self._nth + 1
        return step

    def _sampling(self, *_: Any) -> dict[str, Any]:
        return {name: getattr(self.trainer.args, name, None) for name in _SAMPLING}


def _check(trainer: Any) -> None:
    missing = [
        name for name in ("_generate", "_metrics", "state", "args") if not hasattr(trainer, name)
    ]
    if missing or not hasattr(trainer.args, "steps_per_generation"):
        raise AttachError(
            f"{type(trainer).__name__} has no {', '.join(missing) or 'steps_per_generation'}",
            "rlskip.hosts.trl.attach",
            "it wants a GRPOTrainer or RLOOTrainer of TRL 1.x",
        )
    if getattr(trainer, "environment_factories", None) is not None:
        raise ConfigError(
            "the trainer has environments: rewards may read their state, which a replay does "
            "not bring back",
            "rlskip.hosts.trl.attach",
            "train without skip, or use tools and reward functions instead of environment_factory",
        )


def _restore_rng_by_default() -> None:
    skip = SkipManager.skip_instances[ROLE]
    node = skip_node(skip.global_config) or {}
    given = [place.get("restore_rng") for place in (node, node.get(ROLE) or {})]
    if given == [None, None]:
        skip.local_config.restore_rng = True


def _full_config(config: Any, trainer: Any) -> dict[str, Any]:
    args = trainer.args
    model = getattr(getattr(trainer.model, "config", None), "_name_or_path", None)
    return host_config(
        config,
        experiment_name=getattr(args, "run_name", None) or Path(args.output_dir).name,
        project_name="trl",
        gbs=args.generation_batch_size // args.num_generations,
        n=args.num_generations,
        response_len=args.max_completion_length,
        model=model or None,
    )
