"""What a role is: the interface, the registry, the actions."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from rlskip.config.skip import RoleConfig, RoleSpec
from rlskip.errors import ConfigError, RlskipError
from rlskip.skip.call import Stage


class SkipAction(str, enum.Enum):
    """What to do instead of running a stage. The last two are named for later and refused."""

    CACHE = "cache"
    REPEAT = "repeat"
    RANDOM = "random"
    EMPTY = "empty"


class RoleError(RlskipError, ValueError):
    """A role that cannot be registered or used as asked."""


class BaseSkip(ABC):
    """One role: when a call may be skipped, and what stands in for it.

    The manager asks in this order, on every call of the decorated function whose step is
    listed in ``skip.<role>.steps``: :meth:`meet_precondition`; when true
    :meth:`warp_function`, whose result is returned; when false (or when `warp_function` finds
    the dump unusable) the function itself runs and :meth:`prepare_data` gets its result.

    All methods are plain functions. For an ``async`` stage the manager runs them in a thread,
    several at once, so an instance keeps no state of a single call; what belongs to the call
    under way is in :func:`rlskip.skip.call.current_call`. The first parameters are
    positional-only, for a stage may have arguments of the same names.

    Parameters
    ----------
    local_config
        The role's own dataclass, complete (``steps`` parsed, ``dump_dir`` absolute).
    global_config
        The full config that ``SkipManager.init`` was given.
    """

    support_actions: ClassVar[tuple[SkipAction, ...]] = (SkipAction.CACHE, SkipAction.REPEAT)

    #: Whether every call tells its own step (:meth:`extract_step`), for concurrent pipelines;
    #: else the step is what ``SkipManager.set_step`` said last.
    support_online_step: ClassVar[bool] = False

    #: Keyword options of ``annotate`` that this role understands, beside prompts and identity.
    stage_options: ClassVar[frozenset[str]] = frozenset()

    # Set by register_skip.
    role: ClassVar[str] = ""
    config_class: ClassVar[type[RoleConfig]] = RoleConfig

    def __init__(self, local_config: Any, global_config: Any) -> None:
        self.local_config = local_config
        self.global_config = global_config

    def is_enabled(self) -> bool:
        return bool(self.local_config.enable)

    @abstractmethod
    def meet_precondition(
        self, step: int, func: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> bool:
        """Whether this call can be skipped. Cheap: presence and identity, no loading."""

    @abstractmethod
    def warp_function(
        self, step: int, func: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """What stands in for ``func(*args, **kwargs)``.

        Raise :class:`rlskip.store.CorruptDumpError` when it turns out unusable: the call then
        counts as a miss and `func` runs.
        """

    @abstractmethod
    def prepare_data(self, step: int, result: Any, /, *args: Any, **kwargs: Any) -> None:
        """Keep `result`, which `func` returned, for the next run. Must not change it."""

    def before_stage(
        self, step: int, func: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing stands in for the whole call, and the stage is about to run.

        The role may still give it other prompts: :meth:`rlskip.skip.call.Call.replace_prompts`.
        """
        return

    def observes(self, stage: Stage) -> bool:
        """Whether `stage` always runs, at any step, and the role only looks at its results.

        Then :meth:`prepare_data` is all that is called, with the step that ``set_step`` said
        last, -1 before the first.
        """
        return False

    def idle_at(self, step: int) -> bool:
        """Whether no call can concern this role while ``set_step`` says `step`."""
        observing = type(self).observes is not BaseSkip.observes
        return not (observing or self.support_online_step or step in self.local_config.steps)

    def check_options(self, stage: Stage) -> None:
        """Refuse what ``annotate`` was told and this role does not understand."""
        unknown = sorted(stage.options.keys() - self.stage_options)
        if unknown:
            known = ", ".join(["prompts", "identity", *sorted(self.stage_options)])
            raise ConfigError(
                f"role {self.role} has no option {', '.join(unknown)}",
                f"SkipManager.annotate of {stage.name}",
                f"it understands {known}",
            )

    def flush(self) -> None:
        """Finish what :meth:`prepare_data` left to be done; called when the job ends."""
        return

    def extract_step(self, *args: Any, **kwargs: Any) -> int:
        """The step of this very call, for roles with :attr:`support_online_step`."""
        raise NotImplementedError(f"{type(self).__name__} has no online step")


SKIP_REGISTRY: dict[str, type[BaseSkip]] = {}

C = TypeVar("C", bound=type[BaseSkip])


def register_skip(role: str, config: type[RoleConfig] | None = None) -> Callable[[C], C]:
    """Class decorator: make `role` known, so that ``skip.<role>`` configures it.

    Parameters
    ----------
    role
        Name of the mapping under `skip`; an identifier.
    config
        The role's dataclass, a subclass of :class:`rlskip.config.RoleConfig` that adds the
        fields of its own. None: those of RoleConfig.
    """
    if not role.isidentifier():
        raise RoleError(f"{role!r} is no identifier", "register_skip")
    if config is not None and not issubclass(config, RoleConfig):
        raise RoleError(
            f"{config.__name__} is no RoleConfig",
            f"register_skip({role!r})",
            "derive it from rlskip.config.RoleConfig: `@dataclass class "
            f"{config.__name__}(RoleConfig): ...`",
        )

    def decorate(cls: C) -> C:
        other = SKIP_REGISTRY.get(role)
        # The same class again is a module executed twice (a reload, __main__ and its import).
        if other is not None and other.__qualname__ != cls.__qualname__:
            raise RoleError(
                f"{other.__module__}.{other.__qualname__} already is this role",
                f"register_skip({role!r})",
                "choose another name",
            )
        taken = next((name for name, known in SKIP_REGISTRY.items() if known is cls), role)
        if taken != role:
            raise RoleError(
                f"{cls.__qualname__} already is role {taken!r}, and a class has one",
                f"register_skip({role!r})",
                f"register a subclass: `class Another({cls.__name__}): ...`",
            )
        cls.role = role
        cls.config_class = config or RoleConfig
        SKIP_REGISTRY[role] = cls
        return cls

    return decorate


def role_specs() -> dict[str, RoleSpec]:
    """What the config room needs to know of every registered role."""
    return {
        role: RoleSpec(
            cls.config_class,
            tuple(action.value for action in cls.support_actions),
            cls.stage_options,
            cls.support_online_step,
        )
        for role, cls in SKIP_REGISTRY.items()
    }
