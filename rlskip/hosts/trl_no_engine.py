"""TRL without an inference engine: what takes the place of its ``VLLMGeneration``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NoReturn

from rlskip.errors import NoEngineError
from rlskip.hosts.attach import AttachError

# Where the trainers are, and what makes their engine, or the client of its server.
_TRAINERS = {
    "trl.trainer.grpo_trainer": "GRPOTrainer",
    "trl.trainer.rloo_trainer": "RLOOTrainer",
}
_ENGINE = "VLLMGeneration"


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
    """Within it, ``made(trainer)`` follows the construction of each trainer.

    Parameters
    ----------
    made
        Called at the end of ``GRPOTrainer.__init__`` and ``RLOOTrainer.__init__``.
    engine
        Whether the trainers start their engine.

    Raises
    ------
    AttachError
        This version of TRL makes its engine elsewhere.
    """
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
            trainer.__init__ = _then(trainer.__init__, made)
        yield


def _then(init: Callable[..., None], made: Callable[[Any], None]) -> Callable[..., None]:
    @functools.wraps(init)
    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made(self)

    return constructed
