"""``skip.attach``: functions of other people's modules that are stages of the present job."""

from __future__ import annotations

import functools
import logging
import pkgutil
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs

from rlskip._wrap import AttachError, around, when_imported, wrap_in
from rlskip.batch.row_fields import check
from rlskip.config.skip import AttachConfig
from rlskip.errors import ConfigError
from rlskip.keys import integer
from rlskip.skip.call import Call, Stage, named

log = logging.getLogger(__name__)

# What is attached in the present job. Functions stay wrapped (other modules may hold the wrapper
# under another name) and look up here whether they are a stage.
attached: dict[str, _Attachment] = {}


def attach(
    functions: Mapping[str, AttachConfig],
    roles: Collection[str],
    decorate: Callable[[Stage], Callable[..., Any]],
) -> None:
    """Make the function of each of the `roles` a stage; `decorate` makes one's function.

    Raises AttachError where a module that is already imported has no such function, ConfigError
    where the function that returns the step cannot be imported, or `rows` describes no rows.
    """
    for role, config in functions.items():
        if role in roles:
            _attach(_Attachment(role, config, decorate))
        else:
            log.info("rlskip: skip.attach.%s has no effect: that role is off", role)
    for attachment in attached.values():
        check(attachment.config.rows, f"skip.attach.{attachment.role}.rows")
        attachment.load_step()


def _attach(attachment: _Attachment) -> None:
    name = attachment.config.target
    owner = name.partition(":")[0]
    attached[name] = attachment

    @around
    def stage_if_attached(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        present = attached.get(name)
        return (func if present is None else present.stage(func))(*args, **kwargs)

    def hook(module: ModuleType) -> None:
        if name in attached:  # else this hook is of an earlier job of this process
            wrap_in(module, name, stage_if_attached, "skip.attach")

    when_imported(owner, hook)
    # Other modules would import what runs as ``__main__`` under another name.
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    own = spec.name if spec is not None else file and Path(file).stem  # python -m, or a script
    if owner == own:
        when_imported("__main__", hook)


@attrs.define(eq=False)
class _Attachment:
    """One entry of ``skip.attach``, in use."""

    role: str
    config: AttachConfig
    decorate: Callable[[Stage], Callable[..., Any]]
    _step_function: Callable[..., Any] | None = attrs.field(init=False, default=None)
    stages: dict[Callable[..., Any], Callable[..., Any]] = attrs.field(init=False, factory=dict)

    def load_step(self) -> None:
        """Import the function that returns the step, so that a wrong name ends the job now."""
        if (step := self.config.step) is None or ":" not in step:
            return
        try:
            self._step_function = pkgutil.resolve_name(step)
        except (ImportError, AttributeError) as error:
            raise ConfigError(str(error), self._where("step")) from error
        if not callable(self._step_function):
            raise ConfigError(f"{self._step_function!r} is not a function", self._where("step"))

    def stage(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """`func` as a stage of the role."""
        if func not in self.stages:
            try:
                self.stages[func] = self.decorate(self._describe(func))
            except ConfigError as error:  # its names were typed here
                where = f"skip.attach.{self.role}"
                raise ConfigError(error.what, where, error.remedy) from None
        return self.stages[func]

    def _describe(self, func: Callable[..., Any]) -> Stage:
        config, where = self.config, f"skip.attach.{self.role}"
        entry = f'\'{where}={{target:"{config.target}",step:"..."}}\''
        source = "step is PATH.IN.THE.ARGUMENTS or package.module:function"
        plain = Stage(func, self.role)
        _ = plain.signature  # refused now, not at its first call
        read = functools.partial(self._at, plain)

        def identity(*args: Any, **kwargs: Any) -> dict[str, Any]:
            return {path: read("identity", path, *args, **kwargs) for path in config.identity}

        return Stage(
            func,
            self.role,
            config.prompts and functools.partial(read, "prompts", config.prompts),
            identity if config.identity else None,
            named(func).__qualname__,
            rows=config.rows,
            ignore=(),  # each argument counts, but for those of skip.ignore
            holder=config.prompts and config.prompts.split(".")[0],
            step_of=functools.partial(self._step, read) if config.step else None,
            no_step=(f"{where}.step", f"name its source: {entry}, {source}"),
        )

    def _step(self, read: Callable[..., Any], /, *args: Any, **kwargs: Any) -> int | None:
        named = functools.partial(read, "step", str(self.config.step))
        step = (self._step_function or named)(*args, **kwargs)
        if step is None and self._step_function is not None:
            return None
        if (number := integer(step)) is None or number < 0:
            raise AttachError(f"{step!r} is not a step", self._where("step"))
        return number

    def _at(self, stage: Stage, key: str, path: str, /, *args: Any, **kwargs: Any) -> Any:
        """The value at `path` in a call's arguments."""
        value: Any = Call(stage, args, kwargs).arguments
        for i, name in enumerate(names := path.split(".")):
            try:
                if isinstance(value, Mapping) and name in value:
                    value = value[name]
                elif name.isdecimal():
                    value = value[int(name)]
                else:
                    value = getattr(value, name) if hasattr(value, name) else value[name]
            except (AttributeError, LookupError, TypeError):
                holder = ".".join(names[:i]) or f"{named(stage.func).__qualname__}()"
                raise AttachError(f"{holder} has no {name!r}", self._where(key)) from None
        return value

    def _where(self, key: str) -> str:
        return f"skip.attach.{self.role}.{key}={getattr(self.config, key)}"
