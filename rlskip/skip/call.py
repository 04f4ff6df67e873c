"""One call of a decorated function, while rlskip looks at it."""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import attrs

from rlskip.errors import ConfigError, RlskipError
from rlskip.skip.arguments import ALL, IGNORED, Arguments, likely_prompts, read_arguments

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlskip.skip.prompt_rows import PromptRows
    from rlskip.skip.run_index import Gathered
    from rlskip.skip.visit import Found
    from rlskip.store import UnsupportedTypeError

PromptsSpec = str | Callable[..., Any] | None
IdentitySpec = Mapping[str, Any] | Callable[..., Mapping[str, Any]] | None
LacksSpec = Callable[[Any], Sequence[str]] | None
RowsSpec = Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] | None

_REST = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


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


@attrs.frozen(eq=False, slots=False)  # without slots, for the cached property
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
    #: Where and how to name the step of a call with these arguments, if none is known.
    no_step: Callable[..., tuple[str, str]] | None = None

    @property
    def name(self) -> str:
        return f"{named(self.func).__module__}.{named(self.func).__qualname__}"

    @functools.cached_property
    def _signature(self) -> inspect.Signature:
        return signature_of(self.func)

    @functools.cached_property
    def ignored(self) -> frozenset[str]:
        """The names of the arguments that are not compared."""
        named = [self.prompts] if isinstance(self.prompts, str) else []
        found = likely_prompts(self._signature.parameters)
        return frozenset((*IGNORED, *(self.ignore or ()), *named, *found))

    @functools.cached_property
    def _whole_signature(self) -> inspect.Signature:
        """Of a partial's function: what the partial gives it counts, too."""
        func = self.func
        return signature_of(func.func if isinstance(func, functools.partial) else func)

    def arguments_of(self, call: Call) -> Arguments | None:
        """The arguments of a call that count besides its prompts; None where they are not known."""
        if self.ignore is None:
            return None
        args, kwargs = call.args, call.kwargs
        if isinstance(self.func, functools.partial):
            args, kwargs = (*self.func.args, *args), {**self.func.keywords, **kwargs}
        return read_arguments(self._whole_signature, self.ignored, args, kwargs, call.prompts)

    def refuse_unknown_names(self) -> None:
        """Raise ConfigError if a name in `ignore` is not an argument of the function."""
        parameters = self._whole_signature.parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return
        if unknown := [name for name in self.ignore or () if name not in (ALL, *parameters)]:
            raise ConfigError(
                f"{self.name} has no argument {', '.join(unknown)}",
                f"SkipManager.annotate(role={self.role!r}, ignore=...)",
                f"name some of {', '.join(parameters)}",
            )

    def prompts_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The prompts argument: named, computed, or found (`prompts`, else the first).

        None when the function takes no argument at all.
        """
        if callable(self.prompts):
            return self.prompts(*args, **kwargs)
        bound = bind(self._signature, self.func, args, kwargs)
        bound.apply_defaults()
        if isinstance(self.prompts, str):
            if self.prompts not in bound.arguments:
                raise ConfigError(
                    f"{self.name} has no argument {self.prompts!r}",
                    f"SkipManager.annotate(role={self.role!r}, prompts={self.prompts!r})",
                    f"name one of {', '.join(bound.arguments)}",
                )
            return bound.arguments[self.prompts]
        return next((bound.arguments[name] for name in likely_prompts(bound.arguments)), None)

    def explained(self, error: UnsupportedTypeError) -> UnsupportedTypeError:
        """`error`; where it is about an argument that was not named as the prompts, it says so."""
        parameters = [name for name in self._signature.parameters if name not in ("self", "cls")]
        taken = next(iter(likely_prompts(parameters)), "prompts")
        others = [name for name in parameters if name != taken]
        of_prompts = error.where.startswith("prompts")
        if self.prompts is not None or taken == "prompts" or not others or not of_prompts:
            return error
        return type(error)(
            f"{error.what}; {taken!r}, the first argument, was taken for the prompts",
            error.where,
            f"name the argument that holds them: annotate(prompts={others[0]!r})",
        )

    def identity_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        found = self.identity(*args, **kwargs) if callable(self.identity) else self.identity or {}
        if not isinstance(found, Mapping):
            raise ConfigError(
                f"the function returns {found!r:.80}, and not a mapping",
                f"SkipManager.annotate(role={self.role!r}, identity=...)",
                "return what must be equal by name, such as {'temperature': 1.0}",
            )
        return found

    def refuse_without_step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NoReturn:
        where, remedy = (
            self.name,
            ("call SkipManager.set_step(step) in the training loop, before the stage"),
        )
        if self.no_step is not None:
            where, remedy = self.no_step(*args, **kwargs)
        raise StepNotSetError(f"skip.{self.role} is enabled, but no step is set", where, remedy)

    @property
    def prompt_groups(self) -> list[str]:
        """The field of the prompts that only names their groups, if the stage says which."""
        name = self.rows.get("prompt_group") if isinstance(self.rows, Mapping) else None
        return [name] if name else []

    def lacking(self, result: Any) -> list[str]:
        """The fields that the trainer needs and `result` does not have."""
        return [] if self.lacks is None else list(self.lacks(result))


class Cleanup(ExitStack):
    """Callbacks to run when a call ends, however it ends.

    One that is added later runs at once: a thread continues when its task is cancelled. `failed`
    tells whether the call ended with an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.over = self.failed = False
        self._lock = threading.Lock()

    def add(self, act: Callable[[], object]) -> None:
        with self._lock:
            if not self.over:
                self.callback(act)
                return
        act()

    def __exit__(self, *error: Any) -> bool | None:
        with self._lock:
            self.over, self.failed = True, error[0] is not None
        return super().__exit__(*error)


class StepNotSetError(RlskipError, RuntimeError):
    """A role was called while no step was set."""


@attrs.define(eq=False)
class Call:
    """One call of a stage: what it was given, and what becomes of it.

    The manager makes one for each call and hands it to the methods of the role. Calls run side by
    side, so a role keeps nothing of a single call anywhere else.
    """

    stage: Stage
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    step: int = -1
    prompts: Any = attrs.field(
        init=False,
        default=attrs.Factory(lambda s: s.stage.prompts_of(s.args, s.kwargs), takes_self=True),
    )
    #: What the role computed from the prompts before the stage ran (a stage may alter its input).
    identity: Any = attrs.field(init=False, default=None)
    #: A summary of its prompts, if it is generated.
    prompt_rows: PromptRows | None = attrs.field(init=False, default=None)
    #: The visit of the step that it belongs to, and the dump that serves it; None: no dump does.
    visit: Any = attrs.field(init=False, default=None)
    found: Found | Gathered | None = attrs.field(init=False, default=None)
    #: Its place among the calls of the visit, and its name among those of the step.
    place: int = attrs.field(init=False, default=0)
    name: str = attrs.field(init=False, default="")
    #: The number of the dump that it will have, and why no dump serves it.
    number: int | None = attrs.field(init=False, default=None)
    reason: str = attrs.field(init=False, default="")
    #: Writes an event to the job's records: ``record("dumped", bytes=...)``.
    record: Callable[..., None] = lambda event, **facts: None
    #: What the record of a hit adds: source, bytes, seconds_saved.
    facts: dict[str, Any] = attrs.field(init=False, factory=dict)
    #: Releases what the call holds.
    cleanup: Cleanup = attrs.field(init=False, factory=Cleanup)
    #: What a rank loaded, or why it could not, before the ranks agreed.
    loaded: Any = attrs.field(init=False, default=None)
    #: Compares what the stage returns with the dump that serves the call; None: the stage does
    #: not run.
    verify: Callable[[Any], None] | None = attrs.field(init=False, default=None)
    #: What the stage, a plain function, returned: ``coroutine``, ``task``; empty: its result.
    awaited: str = attrs.field(init=False, default="")
    #: How long the stage itself ran, or the dump took to load, in seconds.
    seconds: float = attrs.field(init=False, default=0.0)

    def summarize_prompts(self) -> PromptRows | None:
        """The prompts one by one, as a dump records them; None if they cannot be taken apart."""
        from rlskip.skip.prompt_rows import PromptRows  # a job that skips nothing needs no torch

        return PromptRows.of(self.prompts, self.stage.prompt_groups)

    def replace_prompts(self, prompts: Any) -> bool:
        """Call the stage with `prompts` instead; False if no argument is the prompts."""
        args = tuple(prompts if arg is self.prompts else arg for arg in self.args)
        kwargs = {k: prompts if arg is self.prompts else arg for k, arg in self.kwargs.items()}
        old, new = [*self.args, *self.kwargs.values()], [*args, *kwargs.values()]
        if all(a is b for a, b in zip(old, new, strict=True)):
            return False
        self.args, self.kwargs = args, kwargs
        return True

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure how long the block runs."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds = time.perf_counter() - began
