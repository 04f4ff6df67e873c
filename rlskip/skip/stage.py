"""A decorated function, and which arguments it takes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs

from rlskip.errors import ConfigError, RlskipError
from rlskip.skip.names import ALL, IGNORED, SELF

PromptsSpec = str | Callable[..., Any] | None
IdentitySpec = Mapping[str, Any] | Callable[..., Mapping[str, Any]] | None
LacksSpec = Callable[[Any], Sequence[str]] | None
RowsSpec = Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] | None

_REST = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


class StepNotSetError(RlskipError, RuntimeError):
    """A role was called while no step was set."""


@attrs.frozen(eq=False, slots=False)  # without slots, for the cached properties
class Stage:
    """A decorated function and the arguments of its ``SkipManager.annotate``."""

    func: Callable[..., Any]
    role: str
    prompts: PromptsSpec = None
    identity: IdentitySpec = None
    #: None where it is not known.
    stage: str | None = None
    lacks: LacksSpec = None
    rows: RowsSpec = None
    totals: Mapping[str, Callable[[Any], Any]] = attrs.field(factory=dict)
    options: Mapping[str, Any] = attrs.field(factory=dict)
    #: None: no argument is compared, and no dump records any.
    ignore: Collection[str] | None = None
    on_replay: Callable[[Any], Any] | None = None
    derived: bool = False
    #: The step of a call with these arguments, None where it must not be skipped; else the step is
    #: what ``SkipManager.set_step`` set last.
    step_of: Callable[..., int | None] | None = None
    #: Where and how to name the step of a call, if none is known.
    no_step: tuple[str, str] | None = None
    #: The argument in which `prompts`, a function, finds them, if that is known.
    holder: str | None = None

    @functools.cached_property
    def name(self) -> str:
        return f"{named(self.func).__module__}.{named(self.func).__qualname__}"

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        return signature_of(self.func)

    @functools.cached_property
    def whole(self) -> Stage:
        """Of a partial the stage of its function: what the partial gives it counts, too."""
        func = self.func
        return attrs.evolve(self, func=func.func) if isinstance(func, functools.partial) else self

    @functools.cached_property
    def names(self) -> list[str]:
        """Of its arguments, without self."""
        return [name for name in self.signature.parameters if name not in SELF]

    @functools.cached_property
    def prompt_groups(self) -> list[str]:
        """The field of the prompts that only names their groups, if the stage says which."""
        name = self.rows.get("prompt_group") if isinstance(self.rows, Mapping) else None
        return [name] if name else []

    @functools.cached_property
    def has_only_ignored(self) -> bool:
        """Whether the function has arguments, and all are such as are never compared.

        One that takes none is told apart by its steps.
        """
        is_named = self.prompts is not None or self.holder is not None
        return not is_named and bool(self.names) and {*self.names} <= {*IGNORED}

    def refuse_unknown_names(self, names: Collection[str], read: Collection[str] = ()) -> None:
        """Raise ConfigError unless `names` are of arguments, or of what the stage is to `read`."""
        parameters = self.whole.signature.parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return
        known = {ALL, *SELF, *parameters, *read}
        if unknown := [name for name in names if name.partition(".")[0] not in known]:
            raise ConfigError(
                f"{self.name} has no argument {', '.join(unknown)}",
                f"SkipManager.annotate(role={self.role!r}, ignore=...)",
                f"name some of {', '.join(parameters)}",
            )


def named(func: Callable[..., Any]) -> Any:
    """What gives a callable its name: a function, what a partial calls, or an object's class."""
    while isinstance(func, functools.partial):
        func = func.func
    return func if hasattr(func, "__qualname__") else type(func)


def signature_of(func: Callable[..., Any]) -> inspect.Signature:
    """The arguments of a callable; raises ConfigError where they are not known."""
    try:
        own = inspect.signature(func, follow_wrapped=False)
        # A decorator that forwards what it gets takes what the function below it takes. One that
        # names all its arguments takes those: it may supply some itself.
        if _REST.isdisjoint(p.kind for p in own.parameters.values()):
            return own
        below = getattr(func, "__wrapped__", None) if inspect.isfunction(func) else None
        return inspect.signature(func) if below is None else signature_of(below)
    except ValueError as error:
        name = f"{named(func).__module__}.{named(func).__qualname__}"
        remedy = "wrap it in a function that names its arguments"
        raise ConfigError("it does not say which arguments it takes", name, remedy) from error
