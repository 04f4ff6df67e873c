"""Roles of the user's own: the interface of verl's SkipManager, and the registry."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from rlskip.config.skip import BUILT_IN_ROLES, BUILT_IN_SPECS, RoleConfig, RoleSpec, SkipAction
from rlskip.errors import ConfigError, RlskipError
from rlskip.skip.call import Call
from rlskip.skip.role import Role


class RoleError(RlskipError, ValueError):
    """A role that cannot be registered."""


class BaseSkip(Role, ABC):
    """A role that keeps and replays results in its own way.

    Of a role whose results rlskip keeps no class is needed. This one has the methods of verl's
    ``BaseSkip``: each gets the step and the arguments of the call. Their first parameters are
    positional-only, because a stage may have arguments of the same names. For an ``async`` stage
    they run in threads, several at a time, so an instance keeps no state of a single call.

    Parameters
    ----------
    local_config
        The role's dataclass, complete (``steps`` parsed, ``dump_dir`` absolute).
    global_config
        The full config that ``SkipManager.init`` was given.
    """

    support_actions: ClassVar[tuple[SkipAction, ...]] = (SkipAction.CACHE, SkipAction.REPEAT)

    # Set by register_skip.
    role: ClassVar[str] = ""  # type: ignore[misc]
    config_class: ClassVar[type[RoleConfig]] = RoleConfig

    def __init__(self, local_config: Any, global_config: Any) -> None:
        self.local_config = local_config
        self.global_config = global_config

    @abstractmethod
    def meet_precondition(
        self, step: int, func: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> bool:
        """Whether this call can be skipped. Cheap: presence and identity, no loading."""

    @abstractmethod
    def warp_function(
        self, step: int, func: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """What replaces ``func(*args, **kwargs)``.

        Raise :class:`rlskip.store.CorruptDumpError` if it turns out to be unusable: the call
        then counts as a miss and `func` runs.
        """

    @abstractmethod
    def prepare_data(self, step: int, result: Any, /, *args: Any, **kwargs: Any) -> None:
        """Keep `result`, which `func` returned, for the next run. Must not change it."""

    def find(self, call: Call) -> bool:
        return self.meet_precondition(call.step, call.stage.func, *call.args, **call.kwargs)

    def replay(self, call: Call) -> Any:
        return self.warp_function(call.step, call.stage.func, *call.args, **call.kwargs)

    def keep(self, call: Call, result: Any) -> None:
        self.prepare_data(call.step, result, *call.args, **call.kwargs)


SKIP_REGISTRY: dict[str, type[BaseSkip]] = {}

C = TypeVar("C", bound=type[BaseSkip])


def register_skip(role: str, config: type[RoleConfig] | None = None) -> Callable[[C], C]:
    """Class decorator: `role` is an instance of this class, configured by ``skip.<role>``.

    Parameters
    ----------
    role
        Name of the mapping under `skip`; an identifier.
    config
        The role's dataclass, a subclass of :class:`rlskip.RoleConfig` that adds fields.
        None: RoleConfig itself.
    """
    if not role.isidentifier():
        raise RoleError(f"{role!r} is not an identifier", "register_skip")
    if config is not None and not issubclass(config, RoleConfig):
        raise RoleError(
            f"{config.__name__} is not a RoleConfig",
            f"register_skip({role!r})",
            "derive it from rlskip.RoleConfig: `@dataclass class "
            f"{config.__name__}(RoleConfig): ...`",
        )
    if role in BUILT_IN_ROLES:
        raise RoleError(
            f"{role} is a role of rlskip's", f"register_skip({role!r})", "choose another name"
        )

    def decorate(cls: C) -> C:
        other = SKIP_REGISTRY.get(role)
        # The same class again is a module executed twice (a reload, __main__ and its import).
        if other is not None and other.__qualname__ != cls.__qualname__:
            raise RoleError(
                f"{other.__module__}.{other.__qualname__} is already this role",
                f"register_skip({role!r})",
                "choose another name",
            )
        taken = next((name for name, known in SKIP_REGISTRY.items() if known is cls), role)
        if taken != role:
            raise RoleError(
                f"{cls.__qualname__} is already role {taken!r}, and a class has one role",
                f"register_skip({role!r})",
                f"register a subclass: `class Another({cls.__name__}): ...`",
            )
        cls.role = role
        cls.config_class = config or RoleConfig
        SKIP_REGISTRY[role] = cls
        return cls

    return decorate


def role_specs() -> dict[str, RoleSpec]:
    """What is known of every role, built in or registered."""
    return {**BUILT_IN_SPECS, **{role: _spec_of(cls) for role, cls in SKIP_REGISTRY.items()}}


def _spec_of(cls: type[BaseSkip]) -> RoleSpec:
    return RoleSpec(
        cls.config_class,
        tuple(action.value for action in cls.support_actions),
        cls.stage_options,
        cls.support_online_step,
    )


def refuse_misspelt(role: str) -> None:
    """Refuse a role that is not known and looks like one that is."""
    known = {*BUILT_IN_ROLES, *SKIP_REGISTRY}
    near = difflib.get_close_matches(str(role), known, n=1, cutoff=0.75)
    if role not in known and (near or not str(role).isidentifier()):
        raise ConfigError(
            f"there is no role {role!r}",
            "SkipManager.annotate",
            f"did you mean {near[0]!r}? A role of your own needs a name that is less alike"
            if near
            else f"known: {', '.join(sorted(known))}",
        )
