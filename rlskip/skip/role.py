"""What a role is: the interface, the registry, the actions."""

from __future__ import annotations

import difflib
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, TypeVar

from rlskip.config.facts import HostFacts
from rlskip.config.skip import BUILT_IN_ROLES, RoleConfig, RoleSpec
from rlskip.errors import ConfigError, RlskipError
from rlskip.skip.call import Stage


class SkipAction(str, enum.Enum):
    """What to do instead of running a stage."""

    CACHE = "cache"
    REPEAT = "repeat"


class RoleError(RlskipError, ValueError):
    """A role that cannot be registered."""


class BaseSkip(ABC):
    """One role: when a call may be skipped, and what replaces it.

    For every call of the decorated function whose step is listed in ``skip.<role>.steps``, the
    manager calls :meth:`meet_precondition`. If that is true, the call returns what
    :meth:`warp_function` returns. If it is false, or `warp_function` finds the dump unusable,
    the function itself runs and :meth:`prepare_data` gets its result.

    All methods are plain functions. For an ``async`` stage the manager runs them in threads,
    several at a time, so an instance keeps no state of a single call; the state of the present
    call is in :func:`rlskip.skip.call.current_call`. The first parameters are positional-only,
    because a stage may have arguments of the same names.

    Parameters
    ----------
    local_config
        The role's dataclass, complete (``steps`` parsed, ``dump_dir`` absolute).
    global_config
        The full config that ``SkipManager.init`` was given.
    """

    support_actions: ClassVar[tuple[SkipAction, ...]] = (SkipAction.CACHE, SkipAction.REPEAT)

    #: Whether every call has its own step (:meth:`extract_step`), for concurrent pipelines;
    #: else its step is the one that ``SkipManager.set_step`` set last.
    support_online_step: ClassVar[bool] = False

    #: Whether the role concerns batches of validation, which pass all others by.
    serves_validation: ClassVar[bool] = False

    #: Whether the second argument of ``__init__`` is the host's facts instead of its config.
    takes_facts: ClassVar[bool] = False

    #: Keyword options of ``annotate`` of this role, besides prompts and identity.
    stage_options: ClassVar[frozenset[str]] = frozenset()

    # Set by register_skip.
    role: ClassVar[str] = ""
    config_class: ClassVar[type[RoleConfig]] = RoleConfig

    def __init__(self, local_config: Any, global_config: Any) -> None:
        self.local_config = local_config
        self.global_config = global_config

    @classmethod
    def beside(cls, roles: Collection[str]) -> type[BaseSkip]:
        """The class to use where these `roles` are on."""
        return cls

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
        """What replaces ``func(*args, **kwargs)``.

        Raise :class:`rlskip.store.CorruptDumpError` if it turns out to be unusable: the call
        then counts as a miss and `func` runs.
        """

    @abstractmethod
    def prepare_data(self, step: int, result: Any, /, *args: Any, **kwargs: Any) -> None:
        """Keep `result`, which `func` returned, for the next run. Must not change it."""

    def before_stage(
        self, step: int, func: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> None:
        """Called on a miss, before the stage runs.

        The role may give it other prompts: :meth:`rlskip.skip.call.Call.replace_prompts`.
        """
        return

    def observes(self, stage: Stage) -> bool:
        """Whether `stage` always runs, at any step, and the role only reads its results.

        Then only :meth:`prepare_data` is called, with the step that ``set_step`` set last (-1
        before the first).
        """
        return False

    def begin_visit(self) -> None:
        """Called when the training loop's step number changes: a step may have several calls."""
        return

    def idle_at(self, step: int) -> bool:
        """Whether no call can concern this role while the training loop is at `step`."""
        observing = type(self).observes is not BaseSkip.observes
        return not (observing or self.support_online_step or step in self.local_config.steps)

    def check_options(self, stage: Stage) -> None:
        """Refuse options of ``annotate`` that this role does not have."""
        unknown = sorted(stage.options.keys() - self.stage_options)
        if unknown:
            known = ", ".join(["prompts", "identity", *sorted(self.stage_options)])
            raise ConfigError(
                f"role {self.role} has no option {', '.join(unknown)}",
                f"SkipManager.annotate of {stage.name}",
                f"known: {known}",
            )

    def flush(self) -> None:
        """Finish what :meth:`prepare_data` began; called when the job ends."""
        return

    def extract_step(self, *args: Any, **kwargs: Any) -> int:
        """The step of this call, for roles with :attr:`support_online_step`."""
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


def make_roles(roles: Mapping[str, RoleConfig], facts: HostFacts) -> dict[str, BaseSkip]:
    """The instances of these `roles`, each with its own config and the facts of the host."""
    classes = {name: SKIP_REGISTRY[name].beside(roles) for name in roles}
    return {
        name: cls(roles[name], facts if cls.takes_facts else facts.config)
        for name, cls in classes.items()
    }


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


def refuse_misspelt(role: str) -> None:
    """Refuse a role that is not registered and looks like one that is."""
    known = {*BUILT_IN_ROLES, *SKIP_REGISTRY}
    near = difflib.get_close_matches(str(role), known, n=1, cutoff=0.75)
    if role not in known and (near or not str(role).isidentifier()):
        raise ConfigError(
            f"there is no role {role!r}",
            "SkipManager.annotate",
            f"did you mean {near[0]!r}? A custom role with such a name must be registered before"
            if near
            else f"known: {', '.join(sorted(known))}",
        )
