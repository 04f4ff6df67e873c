"""A role: what the manager asks of it, and roles of the user's own with their registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from rlskip.config.skip import (
    BUILT_IN_ROLES,
    SKIP_REGISTRY,
    VALIDATION_ROLE,
    RoleConfig,
    SkipAction,
)
from rlskip.errors import ConfigError
from rlskip.skip.call import Call, Stage

if TYPE_CHECKING:
    from rlskip.jobs.records import Recorder
    from rlskip.skip.dumps import Dumps


class Role:
    """When a call of a stage can be skipped, and what replaces it.

    For an ``async`` stage its methods run in threads, several at a time: the state of a call is in
    the :class:`~rlskip.skip.call.Call`.
    """

    #: Whether every call has its own step (:meth:`extract_step`); else `set_step` sets it.
    support_online_step: bool = False
    #: Its own options of ``annotate``.
    stage_options: frozenset[str] = frozenset()
    #: Called with a missed call before the stage runs; it may replace its prompts.
    before_stage: Any = None
    #: Its directory of dumps; None: it has none.
    dumps: Dumps | None = None
    #: Whether it has replaced a call in this process.
    has_replayed: bool = False
    #: Writes its records in this process; None before a function of the role was called.
    recorder: Recorder | None = None
    #: Whether it was called at a step that it lists.
    was_listed: bool = False
    #: The kinds of errors that kept a dump from being written, which have been logged.
    failures: frozenset[str] = frozenset()
    #: What a host logs next, of each call: how many rollouts it returned, how many of them were
    #: replayed, and how many of those from another step, and the seconds saved. None: no host does.
    figures: deque[tuple[int, int, int, float]] | None = None

    def __init__(self, role: str, local_config: Any) -> None:
        self.role = role
        self.local_config = local_config

    @property
    def serves_validation(self) -> bool:
        """Whether the role concerns batches of validation, which all other roles ignore."""
        return self.role == VALIDATION_ROLE

    def is_enabled(self) -> bool:
        return bool(self.local_config.enable)

    def find(self, call: Call) -> bool:
        """Whether `call` can be skipped. Cheap: presence and identity, no loading."""
        raise NotImplementedError

    def replay(self, call: Call) -> Any:
        """What replaces the result of `call`; DumpError: it is unusable, and the stage runs."""
        raise NotImplementedError

    def keep(self, call: Call, result: Any) -> None:
        """Keep `result`, which the stage returned, for the next run. Must not change it."""
        raise NotImplementedError

    def observes(self, stage: Stage) -> bool:
        """Whether `stage` always runs, and its result is only read, by :meth:`keep`."""
        return False

    def begin_visit(self) -> None:
        """Called when the training loop's step number changes: a step may have several calls."""

    def visit(self, step: int) -> Any:
        """What a call of `step` has in common with those since :meth:`begin_visit`, if anything."""

    def flush(self) -> None:
        """Finish what :meth:`keep` began; called when the job ends."""

    def extract_step(self, *args: Any, **kwargs: Any) -> int:
        """The step of a call with these arguments, where it has one of its own."""
        raise NotImplementedError(f"{type(self).__name__} has no online step")

    def count(self, call: Call, result: Any, *, replayed: bool) -> tuple[int, int, int, float]:
        """What is added to :attr:`figures` for the rollouts that `call` returned."""
        from rlskip.batch.columns import length_of  # a job that skips nothing needs no numpy

        rows = max(1, length_of(result))
        elsewhere = replayed and call.facts.get("source") != call.step
        saved = call.facts.get("seconds_saved", 0.0)
        return rows, rows * replayed, rows * elsewhere, saved

    def check_options(self, stage: Stage) -> None:
        """Refuse options of ``annotate`` that this role does not have."""
        if unknown := sorted(stage.options.keys() - self.stage_options):
            raise ConfigError(
                f"role {self.role} has no option {', '.join(unknown)}",
                f"SkipManager.annotate of {stage.name}",
                f"known: {', '.join(['prompts', 'identity', *sorted(self.stage_options)])}",
            )


class BaseSkip(Role, ABC):
    """A role that keeps and replays results in its own way.

    Of a role whose results rlskip keeps no class is needed. This one has the methods of verl's
    ``BaseSkip``: each gets the step and the arguments of the call. For an ``async`` stage they run
    in threads, several at a time, so an instance keeps no state of a single call.

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
        return bool(self._ask(call, self.meet_precondition, call.step, call.stage.func))

    def replay(self, call: Call) -> Any:
        return self._ask(call, self.warp_function, call.step, call.stage.func)

    def keep(self, call: Call, result: Any) -> None:
        self._ask(call, self.prepare_data, call.step, result)

    def _ask(self, call: Call, method: Callable[..., Any], *first: Any) -> Any:
        token = present.set(call)
        try:
            return method(*first, *call.args, **call.kwargs)
        finally:
            present.reset(token)


present: ContextVar[Call | None] = ContextVar("rlskip_present", default=None)
"""What the methods of `BaseSkip` are about while a decorated function is called."""


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
    where = f"register_skip({role!r})"
    if not role.isidentifier():
        raise ConfigError(f"{role!r} is not an identifier", where)
    if config is not None and not issubclass(config, RoleConfig):
        remedy = f"derive it from rlskip.RoleConfig: `class {config.__name__}(RoleConfig): ...`"
        raise ConfigError(f"{config.__name__} is not a RoleConfig", where, remedy)
    if role in BUILT_IN_ROLES:
        raise ConfigError(f"{role} is a role of rlskip's", where, "choose another name")

    def decorate(cls: C) -> C:
        other = SKIP_REGISTRY.get(role)
        # The same class again is a module executed twice (a reload, __main__ and its import).
        if other is not None and other.__qualname__ != cls.__qualname__:
            what = f"{other.__module__}.{other.__qualname__} is already this role"
            raise ConfigError(what, where, "choose another name")
        cls.role = role
        cls.config_class = config or RoleConfig
        SKIP_REGISTRY[role] = cls
        return cls

    return decorate
