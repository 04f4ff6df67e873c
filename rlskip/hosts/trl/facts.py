"""What TRL's trainers say of a run: its names and sizes, what shapes completions, its steps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from rlskip.config.facts import HostFacts
from rlskip.config.skip import VALIDATION_ROLE
from rlskip.format.fingerprint import fingerprint
from rlskip.hosts.standalone_config import ROLE

# The trainer's arguments that shape completions. The seed is not one of them: another draw from
# the same distribution is an equally good sample.
_SAMPLING = (
    "max_completion_length", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
    "generation_kwargs", "chat_template_kwargs",
)  # fmt: skip
# They shape nothing without vLLM, or without tools.
_OF_VLLM = ("vllm_structured_outputs_regex", "vllm_max_model_length")
_OF_TOOLS = ("max_tool_calling_iterations",)
# By role the argument that holds the number of completions a prompt.
_NUMBERS = {ROLE: "num_generations", VALIDATION_ROLE: "num_generations_eval"}


def facts_of(trainer: Any) -> HostFacts:
    args = trainer.args
    model = getattr(getattr(trainer.model, "config", None), "_name_or_path", None)
    validates = {"eval_strategy": "'no'"} if getattr(args, "eval_strategy", "no") != "no" else {}
    validates |= {"eval_on_start": "False"} if getattr(args, "eval_on_start", False) else {}
    n = getattr(args, "num_generations", None)
    rows = getattr(args, "generation_batch_size", None) or args.train_batch_size  # Distillation's
    return HostFacts(
        experiment=getattr(args, "run_name", None) or Path(args.output_dir).name,
        project="trl",
        prompts=rows // (n or 1),
        n=n,
        response_len=getattr(args, "max_completion_length", None),
        model=model or None,
        tokenizer=getattr(getattr(trainer, "processing_class", None), "name_or_path", None) or None,
        engine="vllm" if uses_vllm(trainer) else "transformers",
        validates=validates,
    )


def uses_vllm(trainer: Any) -> bool:
    return bool(getattr(trainer, "use_vllm", getattr(trainer.args, "use_vllm", False)))


def sampling(trainer: Any, role: str) -> dict[str, Any]:
    """What a trainer's arguments say of the completions that it asks for in `role`."""
    template = getattr(trainer, "chat_template", None) or getattr(
        getattr(trainer, "processing_class", None), "chat_template", None
    )
    environments = getattr(trainer, "environment_factories", None) or {}
    tools = [_name_of(tool) for tool in getattr(trainer, "tools", None) or ()]
    names = _SAMPLING + (_OF_VLLM if uses_vllm(trainer) else ()) + (_OF_TOOLS if tools else ())
    given = {name: getattr(trainer.args, name, None) for name in names}
    n = _NUMBERS[role]
    more = {
        "rollout_func": _name_of(getattr(trainer, "rollout_func", None)),
        "tools": tools,
        "environments": {str(n or ""): str(_name_of(one)) for n, one in environments.items()},
        "chat_template": template and fingerprint(template),
    }
    return {
        n: getattr(trainer, n, getattr(trainer.args, n, None)),  # the trainer has the default, too
        **{name: None if value == {} else value for name, value in given.items()},
        # vLLM's rollouts bring log-probs, which the trainer's loss depends on.
        "use_vllm": uses_vllm(trainer),
        **{name: value for name, value in more.items() if value},
    }


def evaluated(trainer: Any, first: int, last: int) -> list[int]:
    """The steps that are known to end in an evaluation that generates: transformers says it."""
    args = trainer.args
    if getattr(args, "eval_strategy", "no") == "no":
        return []
    from transformers import DefaultFlowCallback, TrainerControl

    def evaluates(step: int) -> bool:
        state = copy.copy(trainer.state)
        state.global_step = step
        control = DefaultFlowCallback().on_step_end(args, state, TrainerControl())
        return bool(control.should_evaluate)

    return list(filter(evaluates, range(first, last + 1)))


def _name_of(function: Any) -> str | None:
    return function and str(getattr(function, "__qualname__", type(function).__qualname__))
