"""TRL without an inference engine: what takes the place of its ``VLLMGeneration``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

from rlskip._wrap import AttachError, around
from rlskip.errors import NoEngineError

# Where the trainers are, and what makes their engine, or the client of its server.
_TRAINERS = {
    "trl.trainer.grpo_trainer": "GRPOTrainer",
    "trl.trainer.rloo_trainer": "RLOOTrainer",
}
_ENGINE = "VLLMGeneration"
_IMPORTS_VLLM = ("trl.generation", "trl.generation.vllm_generation")


class NoGeneration:
    """Keeps no weights, sends none, and refuses to generate; for both of TRL's vLLM modes."""

    def __init__(self, **kwargs: Any) -> None:
        # The trainer asks a server once whether its log-probs are those after temperature.
        info = {"model_config": {"logprobs_mode": "processed_logprobs"}}
        self.vllm_client = SimpleNamespace(get_server_info=lambda: info)

    def sync_weights(self) -> None:
        """Do nothing."""

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NoEngineError.of("TRL's trainer asks for a generation, in evaluation perhaps")


@contextlib.contextmanager
def constructing(made: Callable[[Any], None], *, engine: bool) -> Iterator[None]:
    """Within it, ``made(trainer)`` ends the construction of each GRPO or RLOO trainer.

    `engine` tells whether the trainers start their engine.

    Raises
    ------
    AttachError
        This version of TRL makes its engine elsewhere.
    """

    @around
    def and_then(init: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made(self)

    if not engine:
        _import_without_vllm()
    with contextlib.ExitStack() as undo:
        for module_name, class_name in _TRAINERS.items():
            module = import_module(module_name)
            trainer = getattr(module, class_name)
            if not engine:
                if not hasattr(module, _ENGINE):
                    raise AttachError(
                        f"{module_name} has no {_ENGINE}, in whose place rlskip starts no engine",
                        "skip.start_engine=false",
                        "use TRL 1.16, or set skip.start_engine=true",
                    )
                undo.callback(setattr, module, _ENGINE, getattr(module, _ENGINE))
                setattr(module, _ENGINE, NoGeneration)
            undo.callback(setattr, trainer, "__init__", trainer.__init__)
            trainer.__init__ = and_then(trainer.__init__)
        yield


def _import_without_vllm() -> None:
    """Import TRL's trainers, but not vLLM, which takes seconds.

    Does nothing where they have been imported already, or need more of what imports vLLM.
    """
    if sys.modules.keys() & {*_IMPORTS_VLLM, *_TRAINERS}:
        return
    stand_in = ModuleType(_IMPORTS_VLLM[-1])
    setattr(stand_in, _ENGINE, _genuine_engine)
    sys.modules.update(dict.fromkeys(_IMPORTS_VLLM, stand_in))
    try:
        with contextlib.suppress(ImportError):
            for module_name in _TRAINERS:
                import_module(module_name)
    finally:
        for name in _IMPORTS_VLLM:
            del sys.modules[name]


def _genuine_engine(*args: Any, **kwargs: Any) -> Any:
    """Make TRL's own, for a trainer with an engine in the same process."""
    return getattr(import_module(_IMPORTS_VLLM[-1]), _ENGINE)(*args, **kwargs)
