"""SkipManager: which roles are on, which step it is, and the decorator between them."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, NoReturn, TypeVar

from rlskip.config.legacy import retire_legacy_flags
from rlskip.config.skip import read_attachments, read_roles
from rlskip.errors import ConfigError, MissError, NotInstalledError, RlskipError
from rlskip.skip.base import BaseSkip, role_specs
from rlskip.skip.call import Call, IdentitySpec, PromptsSpec, Stage, is_validation
from rlskip.skip.records import Recorder, Tally

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

# Roles whose stage is running around the present call.
_inside: ContextVar[frozenset[str]] = ContextVar("rlskip_inside", default=frozenset())


class _Miss:
    """What `_replay` returns when nothing stands in for the call.

    A class, because joblib and submitit copy a decorated function of ``__main__`` by value: a
    bare object would arrive in their workers as a twin that is not this one.
    """


class StepNotSetError(RlskipError, RuntimeError):
    """A listed role was called before anybody said which step it is."""


class SkipManager:
    """One per process, without instances: what is on, and the step of the training loop."""

    #: The enabled roles. Before `init` a table that looks whether a job asked for skip.
    skip_instances: ClassVar[dict[str, BaseSkip]]

    #: What `set_step` said last.
    step: ClassVar[int | None] = None

    #: Whether somebody sees to ``skip.attach``, as :func:`rlskip.hosts.install` does.
    attaches: ClassVar[bool] = False

    # Roles with nothing to do at this step: worked out once a step, not on every call.
    _idle: ClassVar[frozenset[str]] = frozenset()

    # One for each enabled role, from its first call on.
    _recorders: ClassVar[dict[str, Recorder]] = {}

    @classmethod
    def init(cls, config: Any, *, flush_at_end: bool = False) -> None:
        """Switch on the roles that `config` enables, instead of any that were on before.

        Parameters
        ----------
        config
            A full DictConfig, a mapping with a `skip` entry, or a SkipManagerConfig. A legacy
            skip flag that is on beside ``skip.rollout.enable`` is set False in it.
        flush_at_end
            Whether the caller will call :meth:`flush` when the job ends, whatever happens: then
            ``background_write: auto`` writes dumps in the background.

        Raises
        ------
        ConfigError
            Names every problem of the `skip` node; whatever was on before stays off. Also where
            ``skip.attach`` is there and nobody sees to it.
        """
        cls.refuse("SkipManager.init failed")
        # Here, because these need torch and a job that skips nothing does not.
        import rlskip.skip.roles
        import rlskip.skip.rollout_tq

        roles = read_roles(config, role_specs())
        if roles and not cls.attaches and read_attachments(config, role_specs()):
            raise ConfigError(
                "SkipManager.init attaches nothing",
                "skip.attach",
                "call rlskip.hosts.install(config) in its place",
            )
        for local_config in roles.values():
            if local_config.background_write == "auto":
                local_config.background_write = flush_at_end
        retire_legacy_flags(config, rollout_enabled="rollout" in roles)
        instances = {
            role: rlskip.skip.roles.SKIP_REGISTRY[role](local_config, config)
            for role, local_config in roles.items()
        }
        cls.skip_instances = {
            role: instance for role, instance in instances.items() if instance.is_enabled()
        }
        for role, instance in cls.skip_instances.items():
            local = instance.local_config
            log.info(
                "rlskip: role %s is on: %s at steps %s, dumps in %s",
                role, local.action, local.steps, local.dump_dir,
            )  # fmt: skip

    @classmethod
    def set_step(cls, step: int) -> None:
        """Say which step the training loop is at; call it once a step, before the stages."""
        cls.step = int(step)
        cls._idle = frozenset(
            role for role, skip in dict.items(cls.skip_instances) if skip.idle_at(cls.step)
        )

    @classmethod
    def asked(cls, role: str) -> bool:
        """Whether a function decorated with `role` was called since `init`, at whatever step."""
        return role in cls._recorders

    @classmethod
    def unwritten(cls, role: str) -> Tally:
        """What this process did for `role` since `init` and could not record."""
        return cls._recorders[role].unwritten if cls.asked(role) else Tally()

    @classmethod
    def store(cls, role: str) -> Any:
        """The :class:`~rlskip.store.StepStore` of an enabled role; None where it has none."""
        return getattr(dict.get(cls.skip_instances, role), "store", None)

    @classmethod
    def flush(cls) -> None:
        """Wait until every dump is on disk."""
        for skip in dict.values(cls.skip_instances):
            skip.flush()

    @classmethod
    def reset(cls) -> None:
        """Back to the state before `init`."""
        cls._become(_BeforeInit())

    @classmethod
    def refuse(cls, reason: str) -> None:
        """From now on every decorated function raises: nothing runs unskipped in silence."""
        cls._become(_Refusing(reason))

    @classmethod
    def _become(cls, table: dict[str, BaseSkip]) -> None:
        cls.step = None
        cls._idle = frozenset()
        cls._recorders = {}
        cls.skip_instances = table

    @classmethod
    def annotate(
        cls, role: str, prompts: PromptsSpec = None, identity: IdentitySpec = None, **options: Any
    ) -> Callable[[F], F]:
        """Decorate the function that is stage `role`, plain or ``async``.

        Parameters
        ----------
        role
            The key under `skip` that configures it.
        prompts
            Name of the argument that holds the prompts, or a function of the call's arguments
            that returns them. Default: the argument called `prompts`, else the first after self.
        identity
            What else must be equal for a dump to stand in for the call: a mapping, or a
            function of the call's arguments that returns one. Plain JSON values.
        options
            What else the role understands (``BaseSkip.stage_options``); any other name is
            refused when the enabled role is first called.
        """

        def decorate(func: F) -> F:
            stage = Stage(func, role, prompts, identity, options)
            if inspect.isasyncgenfunction(func) or inspect.isgeneratorfunction(func):
                raise TypeError(f"{stage.name} is a generator; a stage returns its result at once")
            wrap = _wrap_async if inspect.iscoroutinefunction(func) else _wrap_sync
            return functools.wraps(func)(wrap(stage))  # type: ignore[return-value]

        return decorate


def _wrap_sync(stage: Stage) -> Callable[..., Any]:
    func, role = stage.func, stage.role

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        enabled = SkipManager.skip_instances
        if role not in enabled:
            return func(*args, **kwargs) if kwargs else func(*args)
        skip = enabled[role]
        eligible = _eligible_call(skip, stage, args, kwargs)
        if eligible is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        step, call = eligible
        with call.cleanup:
            replayed = _replay(skip, step, call)
            if replayed is not _Miss:
                return replayed
            with _running(skip, call):
                result = func(*call.args, **call.kwargs)
            _dump(skip, step, call, result)
        return result

    return wrapper


def _wrap_async(stage: Stage) -> Callable[..., Any]:
    """As `_wrap_sync`, with everything that may touch the disk off the event loop."""
    func, role = stage.func, stage.role

    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        enabled = SkipManager.skip_instances
        if role not in enabled:
            return await func(*args, **kwargs)
        skip = enabled[role]
        eligible = _eligible_call(skip, stage, args, kwargs)
        if eligible is None:
            return await func(*args, **kwargs)
        step, call = eligible
        with call.cleanup:
            replayed = await asyncio.to_thread(_replay, skip, step, call)
            if replayed is not _Miss:
                return replayed
            with _running(skip, call):
                result = await func(*call.args, **call.kwargs)
            await asyncio.to_thread(_dump, skip, step, call, result)
        return result

    return wrapper


def _eligible_call(
    skip: BaseSkip, stage: Stage, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, Call] | None:
    """The call, with its step, that skip may act on; None when the original shall run."""
    if stage.options:
        skip.check_options(stage)
    if stage.role not in SkipManager._recorders:
        recorder = Recorder(skip.local_config.dump_dir, skip.role)
        recorder.write("consulted", stage=stage.name, **_run_of(skip))
        SkipManager._recorders[skip.role] = recorder
    if stage.role in SkipManager._idle:
        return None
    call = Call(stage, args, kwargs, record=SkipManager._recorders[stage.role].write)
    step = SkipManager.step
    if skip.observes(stage):
        return -1 if step is None else step, call
    if skip.role in _inside.get() or is_validation(call.prompts):
        return None
    if skip.support_online_step:
        step = skip.extract_step(*args, **kwargs)
    if step is None:
        raise StepNotSetError(
            f"skip.{skip.role} is enabled, but nobody said which step it is",
            stage.name,
            "call SkipManager.set_step(step) in the training loop, before the stage",
        )
    return (step, call) if step in skip.local_config.steps else None


@contextmanager
def _running(skip: BaseSkip, call: Call) -> Iterator[None]:
    """The stage runs; calls of the role within it (of its base class, say) are part of it."""
    call.generation_begins()
    inside = _inside.get()
    token = _inside.set(inside if skip.observes(call.stage) else inside | {skip.role})
    try:
        yield
    finally:
        _inside.reset(token)


def _run_of(skip: BaseSkip) -> dict[str, str]:
    """For the records: the role's directory below its dump_dir, where it has one."""
    directory = getattr(skip, "directory", None)
    return {"run": os.path.relpath(directory, skip.local_config.dump_dir)} if directory else {}


def _replay(skip: BaseSkip, step: int, call: Call) -> Any:
    """What stands in for the call, or `_Miss`."""
    from rlskip.store import AbsentDumpError, CorruptDumpError

    if skip.observes(call.stage):
        return _Miss
    with call.current():
        if skip.meet_precondition(step, call.stage.func, *call.args, **call.kwargs):
            try:
                result = skip.warp_function(step, call.stage.func, *call.args, **call.kwargs)
            except (AbsentDumpError, CorruptDumpError) as error:
                log.warning("rlskip: role %s: step %d counts as a miss: %s", skip.role, step, error)
            else:
                call.record("hit", step=step, **call.facts)
                return result
    call.record("miss", step=step)
    if skip.local_config.on_miss == "error":
        raise MissError(
            f"step {step} has no usable dump, and the stage must not run",
            f"skip.{skip.role}.on_miss=error",
            f"generate it once with skip.on_miss=generate, or name other steps than {step}; "
            f"dumps are looked for in {skip.local_config.dump_dir}",
        )
    with call.current():
        skip.before_stage(step, call.stage.func, *call.args, **call.kwargs)
    return _Miss


def _dump(skip: BaseSkip, step: int, call: Call, result: Any) -> None:
    """Let the role keep `result`. Whatever goes wrong, the rollouts reach the trainer."""
    with call.current():
        try:
            skip.prepare_data(step, result, *call.args, **call.kwargs)
        except Exception as error:
            log.warning(
                "rlskip: step %d of role %s was NOT dumped, training goes on: %s: %s",
                step, skip.role, type(error).__name__, error,
                exc_info=not isinstance(error, RlskipError),
            )  # fmt: skip


class _BeforeInit(dict[str, BaseSkip]):
    """The empty table before `init`: it refuses where Hydra says that skip was chosen.

    That happens when the callback was lost (a swept option, ``~hydra.callbacks.rlskip``, the
    compose API) or when Hydra did not discover the plug-in.
    """

    _asked_about: Any = None

    def __contains__(self, role: object) -> bool:
        hydra_config = _hydra_config()
        if hydra_config is not self._asked_about:
            chosen = _chosen_by(hydra_config)
            if chosen:
                self._refuse(chosen)
            self._asked_about = hydra_config
        return False

    @staticmethod
    def _refuse(chosen: str) -> NoReturn:
        raise NotInstalledError(
            f"{chosen} was chosen for this job, but no SkipManager was installed",
            "skip",
            "call SkipManager.init(cfg) first; or, when sweeping the option itself, add "
            "hydra/callbacks=rlskip (Hydra drops an option's own callback there); or, if Hydra "
            "does not list RlskipSearchPathPlugin under `--info plugins`, reinstall rlskip here",
        )


class _Refusing(dict[str, BaseSkip]):
    """The table after a failed start."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self._reason = reason

    def __contains__(self, role: object) -> NoReturn:
        raise NotInstalledError(self._reason, "skip", "mend the config, then start the job again")


def _hydra_config() -> Any:
    """Hydra's runtime config of the job under way; None outside a job. Imports nothing."""
    module = sys.modules.get("hydra.core.hydra_config")
    if module is None:
        return None
    return module.HydraConfig.instance().cfg


def _chosen_by(hydra_config: Any) -> str | None:
    """The override or choice through which a job asked for skip."""
    if hydra_config is None:
        return None
    hydra = hydra_config.hydra
    for override in hydra.overrides.task:
        key, _, value = override.lstrip("+").partition("=")
        asks = value.lower() not in ("false", "null", "none")
        if asks and re.split("[.@]", key, maxsplit=1)[0] == "skip":
            return str(override)
    for group, option in hydra.runtime.choices.items():
        if group.split("@")[0] == "skip" and option is not None:
            return f"skip: {option}"
    return None


SkipManager.skip_instances = _BeforeInit()
