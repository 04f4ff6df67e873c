"""SkyRL without inference engines (``skip.start_engine: false``)."""

from __future__ import annotations

from typing import Any

from rlskip.errors import NoEngineError


async def _nothing(*_: Any, **__: Any) -> None: ...


class NoClient:
    """Takes the place of the client of SkyRL's engines where none is started."""

    sleep = wake_up = staticmethod(_nothing)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NoEngineError.of(f"SkyRL's {name} is called")


def send_no_weights(trainer: Any) -> None:
    """Let `trainer` neither connect its workers to the engines nor send weights to them."""

    def connect_to_nothing() -> None:
        trainer.dispatch.save_weights_for_sampler = _nothing

    trainer.init_weight_sync_state = connect_to_nothing
