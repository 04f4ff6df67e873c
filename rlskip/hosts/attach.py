"""Attach to code that does not know rlskip: wrap a function when its module is imported.

:func:`wrap` wraps one function. :func:`install` is ``SkipManager.init`` and wraps the functions
that ``skip.attach`` names.

This module imports nothing heavy: plug-ins of hosts load it at the start of every process.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import numbers
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import attrs
import wrapt

from rlskip._nodes import as_typed
from rlskip.config.attachments import AttachConfig, Target, role_options
from rlskip.errors import ConfigError, RlskipError

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

# Names under which trainers keep the step.
_STEP_NAME = re.compile(r"(?:global|cur|current|train|training)?_?steps?|iteration")

# The keys of the wrappers around a function; functools.wraps copies it to the outer one.
_WRAPPED_BY = "_rlskip_wrapped_by"


class AttachError(RlskipError, AttributeError):
    """A function to wrap, or the path of an argument, does not exist."""


def when_imported(module: str, hook: Callable[[ModuleType], None]) -> None:
    """Call ``hook(module)`` when `module` is imported, at once if it already is.

    What `hook` raises ends the import of the module.
    """
    wrapt.register_post_import_hook(hook, module)


def wrap(target: str, decorate: Callable[[F], F], *, key: str) -> None:
    """Replace `target` by ``decorate(function)``, now or when its module is imported.

    Parameters
    ----------
    target
        ``package.module:function`` or ``package.module:Class.method``. Static and class methods
        stay static and class methods; an inherited method is overridden in the named class.
    decorate
        Takes the plain function, returns a function.
    key
        Names the wrapper: one key wraps a function at most once.

    Raises
    ------
    TargetError
        `target` is not such a string.
    AttachError
        The module has no such function; raised by the import of the module if that comes later.
        A module that imported the function by name before (``from module import function``)
        keeps the unwrapped one: name that module instead.
    """
    parsed = Target.parse(target)
    when_imported(parsed.module, lambda module: _wrap_in(module, parsed, decorate, key))


def around(body: Callable[..., Any]) -> Callable[[F], F]:
    """A decorator of functions that calls ``body(function, *args, **kwargs)`` in their place.

    What it returns is a coroutine function if `body` or the decorated function is one.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return body(function, *args, **kwargs)

        @functools.wraps(function)
        async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
            return await body(function, *args, **kwargs)

        is_async = any(map(inspect.iscoroutinefunction, (body, function)))
        return async_wrapper if is_async else wrapper  # type: ignore[return-value]

    return decorate


def on_replay(stage: Callable[[F], F], change: Callable[[Any], Any]) -> Callable[[F], F]:
    """As `stage`, a decorator of coroutine functions; a replay returns ``change(result)`` instead.

    What a function itself returns stays as it is.
    """
    ran: ContextVar[bool] = ContextVar("rlskip_ran")

    @around
    async def running(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ran.set(True)
        return await function(*args, **kwargs)

    @around
    async def returning(staged: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ran.set(False)
        result = await staged(*args, **kwargs)
        return result if ran.get() else change(result)

    return lambda function: returning(stage(running(function)))


def _wrap_in(module: ModuleType, target: Target, decorate: Callable[[F], F], key: str) -> None:
    *owners, name = target.path.split(".")
    owner: Any = module
    for i, part in enumerate(owners):
        try:
            owner = getattr(owner, part)
        except AttributeError:
            raise _missing(target, module, ".".join(owners[:i]), part) from None
    try:
        # As it was defined: getattr would bind a class method and unpack a static one.
        raw = inspect.getattr_static(owner, name)
    except AttributeError:
        raise _missing(target, module, ".".join(owners), name) from None
    kind = type(raw) if isinstance(raw, (staticmethod, classmethod)) else None
    function = raw.__func__ if kind else raw
    if not callable(function) or isinstance(function, type):
        raise AttachError(f"{name!r} is not a function: {raw!r}", str(target))
    wrapped_by: frozenset[str] = getattr(function, _WRAPPED_BY, frozenset())
    if key in wrapped_by:
        return
    wrapped = decorate(function)
    setattr(wrapped, _WRAPPED_BY, wrapped_by | {key})
    setattr(owner, name, kind(wrapped) if kind else wrapped)


def _missing(target: Target, module: ModuleType, owner: str, name: str) -> AttachError:
    place = f"{module.__name__}:{owner}" if owner else f"module {module.__name__}"
    return AttachError(
        f"{place} has no {name!r}",
        str(target),
        f"is it another version? The module is {getattr(module, '__file__', None) or 'built in'}",
    )


# -- skip.attach -----------------------------------------------------------------------------

# What is attached in the present job. Functions stay wrapped (other modules may hold the wrapper
# under another name) and look up here whether they are a stage.
_attached: dict[str, _Attachment] = {}


def install(config: Any, **how: Any) -> None:
    """Run ``SkipManager.init`` and make the functions that ``skip.attach`` names stages.

    The parameters are those of ``SkipManager.init``. Functions attached before are detached.

    Raises
    ------
    ConfigError
        Names every problem of the `skip` node.
    AttachError
        A module that is already imported has no such function.
    """
    from rlskip.skip.manager import SkipManager, read_settings

    _attached.clear()
    SkipManager._attaches = True
    SkipManager._refuse("rlskip.hosts.install failed")
    settings = read_settings(config)
    SkipManager.init(settings, **how)
    try:
        for role, entries in settings.attach.items():
            if role in SkipManager.skip_instances:
                for entry in entries:
                    _attach(_Attachment(role, entry))
            else:
                key = as_typed(f"skip.attach.{role}")
                log.info("rlskip: %s has no effect: that role is off", key)
        for attachment in _attached.values():
            attachment.load_step()
    except Exception as error:
        _attached.clear()
        SkipManager._refuse(f"{type(error).__name__}: {error}")
        raise


def uninstall() -> None:
    """Return to the state before :func:`install`: no function is attached."""
    from rlskip.skip.manager import SkipManager

    _attached.clear()
    SkipManager._attaches = False
    SkipManager.reset()


def _attach(attachment: _Attachment) -> None:
    name = attachment.config.target
    target = Target.parse(name)
    _attached[name] = attachment

    def hook(module: ModuleType) -> None:
        if name in _attached:  # else this hook is of an earlier job of this process
            _wrap_in(module, target, _switched(name), "skip.attach")

    when_imported(target.module, hook)
    if target.module == _name_of_main():
        when_imported("__main__", hook)


def _switched(target: str) -> Callable[[F], F]:
    """A decorator that makes a function a stage while `target` is attached."""

    @around
    def stage_if_attached(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        attachment = _attached.get(target)
        return (func if attachment is None else attachment.stage(func))(*args, **kwargs)

    return stage_if_attached


def _name_of_main() -> str | None:
    """The name under which other modules would import what runs as ``__main__``."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:  # python -m
        return str(spec.name)
    file = getattr(main, "__file__", None)
    return Path(file).stem if file else None


@attrs.define(eq=False)
class _Attachment:
    """One entry of ``skip.attach``, in use."""

    role: str
    config: AttachConfig
    _step_function: Callable[..., Any] | None = attrs.field(init=False, default=None)
    _stages: dict[Callable[..., Any], Callable[..., Any]] = attrs.field(init=False, factory=dict)

    def load_step(self) -> None:
        """Import the function that returns the step, so that a wrong name ends the job now."""
        step = self.config.step
        if step is None or ":" not in step:
            return
        target = Target.parse(step)
        try:
            found: Any = import_module(target.module)
            for name in target.path.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(str(error), self._where("step")) from error
        self._step_function = found

    def stage(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """`func` as a stage of the role; sets the step first if the config names its source."""
        if func not in self._stages:
            self._stages[func] = self._decorate(func)
        return self._stages[func]

    def _decorate(self, func: Callable[..., Any]) -> Callable[..., Any]:
        from rlskip.skip.manager import SkipManager

        config = self.config
        options = role_options(config)
        if config.queue is not None:
            options["queue"] = self._reader(func, "queue", config.queue)
        identity = {path: self._reader(func, "identity", path) for path in config.identity}
        annotated = SkipManager.annotate(
            self.role,
            prompts=config.prompts and self._reader(func, "prompts", config.prompts),
            identity=lambda *args, **kwargs: {
                k: read(*args, **kwargs) for k, read in identity.items()
            },
            **options,
        )(func)
        if config.step is None:
            return self._advising(func, annotated)
        step_of = self._step_function or self._reader(func, "step", config.step)

        def with_step(*args: Any, **kwargs: Any) -> Any:
            step = step_of(*args, **kwargs)
            if step is None and self._step_function:
                return func(*args, **kwargs)
            try:
                SkipManager.set_step(step)
            except (TypeError, ValueError):
                raise AttachError(f"{step!r} is not a step", self._where("step")) from None
            return annotated(*args, **kwargs)

        return with_step

    def _advising(self, func: F, stage: F) -> F:
        """`stage`; the error for a missing step names the key to set, not a call to insert."""
        from rlskip.skip.manager import StepNotSetError

        @contextlib.contextmanager
        def advice(*args: Any, **kwargs: Any) -> Iterator[None]:
            try:
                yield
            except StepNotSetError as error:
                if error.where != f"{func.__module__}.{func.__qualname__}":
                    raise  # of another stage, within this one
                arguments = inspect.signature(func).bind(*args, **kwargs).arguments
                paths = _paths_of_steps(arguments)
                choice = paths[0] if paths else "<path of the step, or package.module:function>"
                also = f"; also there: {', '.join(paths[1:])}" if paths[1:] else ""
                raise StepNotSetError(
                    error.what,
                    f"skip.attach.{self.role}.step",
                    f'name its source: \'skip.attach.{self.role}={{target:"{self.config.target}",'
                    f'step:"{choice}"}}\'{also}',
                ) from None

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with advice(*args, **kwargs):
                return stage(*args, **kwargs)

        async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
            with advice(*args, **kwargs):
                return await stage(*args, **kwargs)

        chosen = async_wrapper if inspect.iscoroutinefunction(func) else wrapper
        return functools.wraps(func)(chosen)  # type: ignore[return-value]

    def _reader(self, func: Callable[..., Any], key: str, path: str) -> Callable[..., Any]:
        """A function of the call's arguments that returns the value at `path`."""
        signature = inspect.signature(func)

        def read(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            value: Any = {**bound.kwargs, **bound.arguments}
            for i, name in enumerate(names := path.split(".")):
                try:
                    value = _part(value, name)
                except (AttributeError, LookupError, TypeError):
                    holder = ".".join(names[:i]) or f"{func.__qualname__}()"
                    raise AttachError(f"{holder} has no {name!r}", self._where(key)) from None
            return value

        return read

    def _where(self, key: str) -> str:
        return f"skip.attach.{self.role}.{key}={getattr(self.config, key)}"


def _paths_of_steps(arguments: Mapping[str, Any]) -> list[str]:
    """Paths from a call's arguments to whole numbers that are called a step, the likeliest first.

    A global step is likelier than others (a counter of accumulated batches, say), then the nearest.
    """
    found: list[str] = []
    level: dict[str, Any] = dict(arguments)
    for _ in range(3):
        found += [
            path
            for path, value in level.items()
            if _STEP_NAME.fullmatch(path.rpartition(".")[2])
            and isinstance(value, numbers.Integral)
            and not isinstance(value, bool)
        ]
        level = {
            f"{path}.{name}": part
            for path, value in level.items()
            # What is stored, so that no property is evaluated.
            for name, part in (value if isinstance(value, dict) else _attributes(value)).items()
            if isinstance(name, str) and name.isidentifier()
        }
    return sorted(found, key=lambda path: not path.rpartition(".")[2].startswith("global"))


def _attributes(value: Any) -> dict[str, Any]:
    return {} if isinstance(value, type | ModuleType) else getattr(value, "__dict__", {})


def _part(value: Any, name: str) -> Any:
    """An entry of a mapping or a sequence, else an attribute."""
    if isinstance(value, Mapping) and name in value:
        return value[name]
    if name.isdecimal():
        return value[int(name)]
    return getattr(value, name) if hasattr(value, name) else value[name]
