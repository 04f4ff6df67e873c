"""A decorated function: which arguments it takes, and which of them holds a call's prompts."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

import attrs

from rlskip.errors import ConfigError, RlskipError
from rlskip.skip.arguments import ALL, IGNORED, Arguments, is_data, is_single, read_arguments
from rlskip.skip.code import Code, innermost
from rlskip.skip.hidden import SELF, FirstValues, add_hidden

PromptsSpec = str | Callable[..., Any] | None
IdentitySpec = Mapping[str, Any] | Callable[..., Mapping[str, Any]] | None
LacksSpec = Callable[[Any], Sequence[str]] | None
RowsSpec = Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] | None

_REST = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
_MAX_ENTRIES = 256


class StepNotSetError(RlskipError, RuntimeError):
    """A role was called while no step was set."""


@attrs.frozen(eq=False, slots=False)  # without slots, for the cached properties
class Stage:
    """A decorated function and the arguments of its ``SkipManager.annotate``."""

    func: Callable[..., Any]
    role: str
    prompts: PromptsSpec = None
    identity: IdentitySpec = None
    #: The stage's name in the identity of its dumps; None where it is not known.
    stage: str | None = None
    lacks: LacksSpec = None
    #: What the fields of its rows hold, where their names do not tell.
    rows: RowsSpec = None
    #: By name functions of rows that are put together of several dumps: they return what belongs
    #: to a whole batch.
    totals: Mapping[str, Callable[[Any], Any]] = attrs.field(factory=dict)
    #: Keyword options that only the role understands (``BaseSkip.stage_options``).
    options: Mapping[str, Any] = attrs.field(factory=dict)
    #: Names of arguments that are not compared; None: none is, and no dump records any.
    ignore: Collection[str] | None = None
    #: What a call returns, made of the result that is replayed; None: the result itself.
    on_replay: Callable[[Any], Any] | None = None
    #: Whether its prompts are what an earlier stage returned: those of no dump are then a miss.
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
    def _code(self) -> Callable[[type | None], Code]:
        return functools.cache(functools.partial(Code.of, self.func))

    def code_of(self, call: Given) -> Code:
        """What a call runs: of a method, that of the class of its object, which may override it."""
        func = self.func.func if isinstance(self.func, functools.partial) else self.func
        owner = getattr(func, "__self__", None)
        if owner is None and isinstance(func, types.FunctionType):
            owner = next((call.bound.arguments[n] for n in SELF if n in call.bound.arguments), None)
        elif owner is None:
            owner = func
        return self._code(owner if isinstance(owner, type) else type(owner))

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        return signature_of(self.func)

    @functools.cached_property
    def _whole_signature(self) -> inspect.Signature:
        """Of a partial's function: what the partial gives it counts, too."""
        func = self.func
        return signature_of(func.func) if isinstance(func, functools.partial) else self.signature

    @functools.cached_property
    def names(self) -> list[str]:
        """Of its arguments, without self."""
        return [name for name in self.signature.parameters if name not in SELF]

    @property
    def prompt_groups(self) -> list[str]:
        """The field of the prompts that only names their groups, if the stage says which."""
        name = self.rows.get("prompt_group") if isinstance(self.rows, Mapping) else None
        return [name] if name else []

    # -- what a call was given -------------------------------------------------------------------

    def prompts_of(self, call: Given) -> Any:
        """The prompts argument: named, computed, or found (:func:`likely_prompts`).

        None when the function takes no argument at all.
        """
        if callable(self.prompts):
            return self.prompts(*call.args, **call.kwargs)
        arguments = by_name(call.bound)
        if self.prompts is not None and self.prompts not in arguments:
            raise ConfigError(
                f"{self.name} has no argument {self.prompts!r}",
                f"SkipManager.annotate(role={self.role!r}, prompts={self.prompts!r})",
                f"name one of {', '.join(arguments)}",
            )
        return arguments.get(call.holder)

    def holder_of(self, call: Given) -> str:
        """The argument that holds the prompts; empty: none does."""
        if self.holder or isinstance(self.prompts, str):
            return str(self.holder or self.prompts)
        taken = likely_prompts(call.bound)
        if self.prompts is None:
            return taken
        arguments = by_name(call.bound)
        holding = [name for name, value in arguments.items() if holds(value, call.prompts)]
        # Prompts that are computed may be made of anything but a number or a text.
        computed = "" if is_single(arguments.get(taken)) else taken
        return min(holding or [computed], key=lambda name: name in SELF)

    def arguments_of(
        self, call: Given, more_ignored: Collection[str], first: FirstValues
    ) -> Arguments | None:
        """What counts of a call besides its prompts: arguments, and attributes that shape rollouts.

        None where they are not known.
        """
        if self.ignore is None:
            return None
        func, bound, holder = self.func, call.bound, call.holder
        whole = () if callable(self.prompts) else (holder,)
        ignored = frozenset((*IGNORED, *self.ignore, *more_ignored, *whole))
        if isinstance(func, functools.partial):
            args, kwargs = (*func.args, *call.args), {**func.keywords, **call.kwargs}
            func = func.func
            bound = bind(self._whole_signature, func, args, kwargs)
        found = read_arguments(bound, ignored, call.prompts, holder)
        if ALL not in ignored:
            near = {n: v for n, v in by_name(bound).items() if n in (*SELF, holder)}
            roots = {n: v for n, v in near.items() if n in SELF or v is not call.prompts}
            if (owner := getattr(func, "__self__", None)) is not None:
                func, roots["self"] = getattr(func, "__func__", func), owner
            elif not isinstance(func, types.FunctionType):
                roots["self"] = func
            add_hidden(found, roots, func, self.code_of(call).functions, call.prompts, first)
        if self.prompts is None and found.large and holder != "prompts":
            self._refuse_as_prompts(call.prompts, holder, found.large[0])
        return found

    def identity_of(self, call: Given) -> Mapping[str, Any]:
        """What else must be equal, by ``annotate(identity=...)``."""
        found = self.identity or {}
        found = found(*call.args, **call.kwargs) if callable(found) else found
        if not isinstance(found, Mapping):
            raise ConfigError(
                f"the function returns {found!r:.80}, and not a mapping",
                f"SkipManager.annotate(role={self.role!r}, identity=...)",
                "return what must be equal by name, such as {'temperature': 1.0}",
            )
        return found

    @functools.cached_property
    def has_only_ignored(self) -> bool:
        """Whether the function has arguments, and all are such as are never compared.

        One that takes none is told apart by its steps.
        """
        is_named = self.prompts is not None or self.holder is not None
        return not is_named and bool(self.names) and {*self.names} <= {*IGNORED}

    def lacking(self, result: Any) -> list[str]:
        """The fields that the trainer needs and `result` does not have."""
        return [] if self.lacks is None else list(self.lacks(result))

    # -- what is refused -------------------------------------------------------------------------

    def refuse_unknown_names(self) -> None:
        """Raise ConfigError unless the function has the arguments in `ignore` and `holder`."""
        parameters = self._whole_signature.parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return
        names = [*(self.ignore or ()), *([self.holder] if self.holder else [])]
        code = getattr(innermost(self.func), "__code__", None)
        more = (*code.co_freevars, *code.co_names) if code else ()  # of its closure and its module
        known = (ALL, *SELF, *parameters, *more)
        if unknown := [name for name in names if name.partition(".")[0] not in known]:
            raise ConfigError(
                f"{self.name} has no argument {', '.join(unknown)}",
                f"SkipManager.annotate(role={self.role!r}, ignore=...)",
                f"name some of {', '.join(parameters)}",
            )

    def refuse_without_step(self) -> NoReturn:
        where, remedy = (
            self.name,
            "call SkipManager.set_step(step) in the training loop, before the stage",
        )
        if self.no_step is not None:
            where, remedy = self.no_step
        raise StepNotSetError(f"skip.{self.role} is enabled, but no step is set", where, remedy)

    def _refuse_as_prompts(self, prompts: Any, taken: str, other: str) -> None:
        """Raise ConfigError if a single value was taken for the prompts, and `other` is a batch."""
        if is_single(prompts) or (isinstance(prompts, tuple) and not prompts):
            raise ConfigError(
                f"{taken!r}, which is not a batch, was taken for the prompts, and "
                f"{other!r} is too large to be compared",
                f"SkipManager.annotate of {self.name}",
                f"name the argument that holds them: annotate(prompts={other!r})",
            )


@attrs.define(eq=False, slots=False)  # without slots, for the cached properties
class Given:
    """What a call of a stage was given."""

    stage: Stage
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    prompts: Any = attrs.field(
        init=False, default=attrs.Factory(lambda s: s.stage.prompts_of(s), takes_self=True)
    )

    @functools.cached_property
    def bound(self) -> inspect.BoundArguments:
        """Its arguments, with defaults."""
        bound = bind(self.stage.signature, self.stage.func, self.args, self.kwargs)
        bound.apply_defaults()
        return bound

    @functools.cached_property
    def holder(self) -> str:
        """The argument that holds its prompts; empty: none does."""
        return self.stage.holder_of(self)

    def replace_prompts(self, prompts: Any) -> bool:
        """Call the stage with `prompts` instead; False if no argument is the prompts."""
        args = tuple(prompts if arg is self.prompts else arg for arg in self.args)
        kwargs = {k: prompts if arg is self.prompts else arg for k, arg in self.kwargs.items()}
        old, new = [*self.args, *self.kwargs.values()], [*args, *kwargs.values()]
        if all(a is b for a, b in zip(old, new, strict=True)):
            return False
        self.args, self.kwargs = args, kwargs
        return True


# -- signatures ----------------------------------------------------------------------------------


def named(func: Callable[..., Any]) -> Any:
    """What gives a callable its name: a function, what a partial calls, or an object's class."""
    while isinstance(func, functools.partial):
        func = func.func
    return func if hasattr(func, "__qualname__") else type(func)


def signature_of(func: Callable[..., Any]) -> inspect.Signature:
    """The arguments of a callable; raises ConfigError where they are not known.

    A decorator that only forwards what it gets, ``(*args, **kwargs)``, takes what the function
    below it takes. One that names other arguments takes those: it may supply some itself.
    """
    try:
        own = inspect.signature(func, follow_wrapped=False)
        kinds = {p.kind for p in own.parameters.values()}
        if kinds.isdisjoint(_REST):
            return own
        below = getattr(func, "__wrapped__", None) if inspect.isfunction(func) else None
        whole = inspect.signature(func) if below is None else signature_of(below)
    except ValueError as error:
        name = f"{named(func).__module__}.{named(func).__qualname__}"
        remedy = "wrap it in a function that names its arguments"
        raise ConfigError("it does not say which arguments it takes", name, remedy) from error
    names = [name for name, p in own.parameters.items() if p.kind not in _REST]
    theirs = [*whole.parameters][: len(names)]
    if theirs[:1] in (["self"], ["cls"]):  # decorators call it anything
        names, theirs = names[1:], theirs[1:]
    return whole if names == theirs else own


def bind(
    signature: inspect.Signature,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> inspect.BoundArguments:
    """The arguments of a call of `func` by `signature`, that of :func:`signature_of`.

    Where a decorator that only forwards supplies some, they are as the decorator takes them.
    """
    try:
        return signature.bind(*args, **kwargs)
    except TypeError:
        own = inspect.signature(func, follow_wrapped=False)
        if own == signature:
            raise
        return own.bind(*args, **kwargs)


def by_name(bound: inspect.BoundArguments) -> dict[str, Any]:
    """The arguments of a call by name, those in ``**kwargs`` last."""
    parameters = bound.signature.parameters
    kept = [name for name, p in parameters.items() if p.kind is p.VAR_KEYWORD]
    more = bound.arguments.get("".join(kept), {})
    return {**bound.arguments, **{k: v for k, v in more.items() if k not in bound.arguments}}


def likely_prompts(bound: inspect.BoundArguments) -> str:
    """The argument that holds the prompts, where nothing names it; empty: none does.

    It is the one called `prompts`, else the first: if that is a number such as a step, the first
    that holds data.
    """
    kinds = {name: p.kind for name, p in bound.signature.parameters.items()}
    first = next((name for name in kinds if name not in SELF), "")
    # Where there is nothing but ``**kwargs``, all of it is.
    if not first or kinds[first] is inspect.Parameter.VAR_KEYWORD:
        return first
    arguments = by_name(bound)
    if "prompts" in arguments:
        return "prompts"
    if first in IGNORED and is_single(arguments[first]):
        named = {
            k: v for k, v in arguments.items() if kinds.get(k) is not inspect.Parameter.VAR_KEYWORD
        }
        return next((k for k, v in named.items() if k not in SELF and is_data(v)), first)
    return first


def holds(value: Any, prompts: Any) -> bool:
    """Whether `value` is the prompts, or has them as an entry or an attribute."""
    if is_single(prompts):
        return False
    level = [value, type(value)]
    with contextlib.suppress(Exception):  # an object of the user's raises anything
        for _ in range(2):
            parts = [o if isinstance(o, dict) else getattr(o, "__dict__", {}) for o in level]
            level += [one for some in parts if len(some) <= _MAX_ENTRIES for one in some.values()]
    return any(one is prompts for one in level)
