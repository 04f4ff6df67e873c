"""TRL's trainers: by which method each generates, and their construction, without an engine too."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import attrs

from rlskip._wrap import AttachError, around, when_imported
from rlskip.errors import NoEngineError


@attrs.frozen
class Seam:
    """What ``_generate`` of a trainer in `module` returns: its `parts` by name.

    Without `parts` it generates in another way, and is refused. `has_engine`: the module has the
    name of the engine, which the trainer makes.
    """

    module: str
    parts: tuple[str, ...] = ()
    has_engine: bool = False

    def named(self, output: Sequence[Any]) -> dict[str, Any]:
        """What the method returned, by name."""
        return {self._name(i): part for i, part in enumerate(output)}

    def output(self, named: Mapping[str, Any]) -> tuple[Any, ...]:
        """What `named` made a mapping of; None for a part that a replay left out."""
        numbers = (i for i in range(len(named)) if self._name(i) in named)
        return tuple(named.get(self._name(i)) for i in range(1 + max(numbers, default=-1)))

    def _name(self, number: int) -> str:
        return self.parts[number] if number < len(self.parts) else f"part_{number}"


_experimental = "trl.experimental.{0}.{0}_trainer".format
_IDS = ("prompt_ids", "completion_ids")

#: Trainers by the name of their class; a subclass has the seam of its base.
SEAMS = {
    "GRPOTrainer": Seam(  # and GMPOTrainer
        "trl.trainer.grpo_trainer",
        (*_IDS, "tool_mask", "completions", "logprobs", "extra_fields", "images", "tool_images"),
        has_engine=True,
    ),
    "RLOOTrainer": Seam("trl.trainer.rloo_trainer", (*_IDS, "completions"), has_engine=True),
    "DistillationTrainer": Seam(  # and ServerDistillationTrainer
        "trl.trainer.distillation_trainer",
        (*_IDS, "tool_mask", "images", "tool_images"),
        has_engine=True,
    ),
    "SDPOTrainer": Seam(_experimental("sdpo"), _IDS),
    "SDFTTrainer": Seam(_experimental("sdft"), _IDS),
    # These generate in another way.
    "A2POTrainer": Seam(_experimental("a2po")),
    "AsyncDistillationTrainer": Seam(_experimental("async_distillation")),
    "AsyncGRPOTrainer": Seam(_experimental("async_grpo")),
    "GKDTrainer": Seam(_experimental("gkd")),
    "GOLDTrainer": Seam(_experimental("gold")),
    "IWOPDTrainer": Seam(_experimental("iw_opd")),
    "OnlineDPOTrainer": Seam(_experimental("online_dpo")),
}
_ENGINE = "VLLMGeneration"


def seam_of(trainer: Any) -> Seam:
    """How `trainer` generates; raises AttachError if it does not by ``_generate``."""
    names = [made.__name__ for made in type(trainer).__mro__]
    seam = next((SEAMS[name] for name in names if name in SEAMS), None)
    if seam is not None and seam.parts and hasattr(trainer, "_generate"):
        return seam
    what = f"rlskip knows no method by which {names[0]} generates, and which a replay could replace"
    known = ", ".join(name for name in SEAMS if SEAMS[name].parts)
    remedy = f"train it without skip, or pass a trainer of TRL 1.x among {known}"
    raise AttachError(what, "rlskip.hosts.trl.attach", remedy)


def stage_name(trainer: Any) -> str:
    """The name of the trainer's stage: that of TRL's class, which a user's own may derive from."""
    classes = type(trainer).__mro__
    of_trl = (made for made in classes if made.__module__.partition(".")[0] == "trl")
    return f"trl.{next(of_trl, classes[0]).__name__}"


class NoGeneration:
    """Keeps no weights, sends none, and refuses to generate; for both of TRL's vLLM modes."""

    def __init__(self, **kwargs: Any) -> None:
        # The trainer asks a server once whether its log-probs are those after temperature.
        info = {"model_config": {"logprobs_mode": "processed_logprobs"}}
        self.vllm_client = SimpleNamespace(get_server_info=lambda: info)

    def sync_weights(self) -> None: ...

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NoEngineError.of("TRL's trainer asks for a generation, in evaluation perhaps")


@contextlib.contextmanager
def constructing(made: Callable[[Any], None], *, engine: bool) -> Iterator[None]:
    """Within it, ``made(trainer)`` ends the construction of each trainer that generates.

    `engine` tells whether the trainers start theirs. AttachError: this TRL makes it elsewhere.
    """

    @around
    def and_then(init: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made(self)

    def follow(name: str, has_engine: bool, module: ModuleType) -> None:
        if left:  # a module that is imported later
            return
        if not engine and has_engine:
            if not hasattr(module, _ENGINE):
                what = f"{module.__name__} has no {_ENGINE}, in whose place rlskip starts no engine"
                remedy = "use TRL 1.16, or set skip.start_engine=true"
                raise AttachError(what, "skip.start_engine=false", remedy)
            undo.callback(setattr, module, _ENGINE, getattr(module, _ENGINE))
            setattr(module, _ENGINE, NoGeneration)
        trainer = getattr(module, name)
        undo.callback(setattr, trainer, "__init__", trainer.__init__)
        trainer.__init__ = and_then(trainer.__init__)

    left: list[bool] = []
    with contextlib.ExitStack() as undo:
        undo.callback(left.append, True)
        for name, seam in SEAMS.items():
            when_imported(seam.module, functools.partial(follow, name, seam.has_engine))
        yield
