"""TRL's environments (`environment_factory`): a reward must not read what no dump holds.

TRL resets its environments before it generates, so a replay resets them too. Their methods are
the tools that are called while it generates: a replay skips these calls, and leaves each
environment as `reset` left it.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any, NoReturn

from rlskip.errors import ConfigError

# The argument in which TRL passes the environments to rewards.
_ENVIRONMENTS = "environments"


def refuse_rewards(trainer: Any) -> None:
    """Refuse a reward that takes the environments: `get_reward` of one of them, or a function.

    Raises
    ------
    ConfigError
        Names the reward.
    """
    if not environments_of(trainer):
        return
    own = {type(pool[0]).__name__ for pool in trainer._environment_pool.values()}
    for function, name in zip(trainer.reward_funcs, trainer.reward_func_names, strict=True):
        if _takes_environments(function):
            raise _error(
                f"{name}.get_reward needs" if name in own else f"the reward {name} takes",
                f"{_ENVIRONMENTS}, whose state",
            )


def hide_state(trainer: Any) -> None:
    """Replace the environments of the present batch, so that a reward that reads one is refused.

    A function may take them among its ``**kwargs``, which only shows when it reads them.
    """
    if getattr(trainer, _ENVIRONMENTS, None):
        trainer.environments = [_Hidden(type(made).__name__) for made in trainer.environments]


def environments_of(trainer: Any) -> dict[str, str]:
    """The factories of a trainer's environments by name; empty without any."""
    factories = getattr(trainer, "environment_factories", None) or {}
    return {
        str(name or ""): getattr(factory, "__qualname__", type(factory).__qualname__)
        for name, factory in factories.items()
    }


class _Hidden:
    """Replaces an environment of the class `name` where rewards are computed."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        frame = sys._getframe(1)
        while frame.f_code.co_name.startswith("<") and frame.f_back:  # a comprehension or lambda
            frame = frame.f_back
        who = f"the reward {frame.f_code.co_name} reads"
        raise _error(who, f"{self._name}.{attribute}, which")

    def __repr__(self) -> str:
        return f"<{self._name}, hidden by rlskip>"


def _takes_environments(reward: Any) -> bool:
    try:
        return _ENVIRONMENTS in inspect.signature(reward).parameters
    except (TypeError, ValueError):  # of some builtins
        return False


def _error(who: str, what: str) -> ConfigError:
    return ConfigError(
        f"{who} {what} a replay does not restore, because it skips the calls that change it",
        "rlskip.hosts.trl.attach",
        "compute the reward from `completions`, which hold the calls of tools and their results, "
        "or train without skip",
    )
