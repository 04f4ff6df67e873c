"""A decorated function, and one call of it, while rlskip looks at it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs

from rlskip.errors import ConfigError, RlskipError
from rlskip.format.dump_errors import UnsupportedTypeError
from rlskip.jobs.served import Needs
from rlskip.skip.names import ALL, IGNORED, NEUTRAL_META, SELF
from rlskip.skip.plain import is_data, is_single
from rlskip.skip.stored import attributes_of

if TYPE_CHECKING:
    from rlskip.skip.prompt_rows import PromptRows
    from rlskip.store.layout import Place

PromptsSpec = str | Callable[..., Any] | None
IdentitySpec = Mapping[str, Any] | Callable[..., Mapping[str, Any]] | None
LacksSpec = Callable[[Any], Sequence[str]] | None
RowsSpec = Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] | None


class StepNotSetError(RlskipError, RuntimeError):
    """A role was called while no step was set."""


@attrs.frozen(eq=False, slots=False)  # without slots, for the cached properties
class Stage:
    """A decorated function and the arguments of its ``SkipManager.annotate``."""

    func: Callable[..., Any]
    role: str
    prompts: PromptsSpec = None
    identity: IdentitySpec = None
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
        """Its arguments; raises ConfigError where they are not known."""
        try:
            return signature_of(self.func)
        except ValueError as error:
            remedy = "wrap it in a function that names its arguments"
            what = "it does not say which arguments it takes"
            raise ConfigError(what, self.name, remedy) from error

    @functools.cached_property
    def whole(self) -> Stage:
        """Of a partial the stage of its function: what the partial gives it counts, too."""
        func = self.func
        return attrs.evolve(self, func=func.func) if isinstance(func, functools.partial) else self

    @functools.cached_property
    def prompt_groups(self) -> list[str]:
        """The field of the prompts that only names their groups, if the stage says which."""
        name = self.rows.get("prompt_group") if isinstance(self.rows, Mapping) else None
        return [name] if name else []

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


_ENDING = threading.Lock()  # one for all calls: it is held for an append


@attrs.define(eq=False, slots=False)  # without slots, for the cached properties
class Call:
    """One call of a stage: what it was given, and what becomes of it.

    Calls run side by side, so a role keeps nothing of a single call anywhere else. It is a context:
    once it is `over`, what was told to :meth:`at_end` has run, and `failed` tells whether by an
    error.
    """

    stage: Stage
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    step: int = -1
    #: Writes an event to the job's records: ``record("dumped", bytes=...)``.
    record: Callable[..., None] = lambda event, **facts: None
    #: Whether the stage always runs, and its result is only read.
    is_observed: bool = False
    #: The visit of the step that it belongs to; its place there, and its name among the step's.
    visit: Any = None
    place: int = attrs.field(init=False, default=0)
    name: str = attrs.field(init=False, default="")
    #: What the role computed before the stage ran, which may alter its input; and its `Arguments`.
    identity: Any = attrs.field(init=False, default=None)
    compared: Any = attrs.field(init=False, default=None)
    #: The dump or groups that serve it, if any, the meta that was judged, and what the ledger knows
    #: of it.
    found: Any = attrs.field(init=False, default=None)
    meta: Any = attrs.field(init=False, default=None)
    parts: Sequence[Hashable] = attrs.field(init=False, default=())
    #: The name of the dump that its own replaces, if any, and why no dump serves it.
    replaces: str | None = attrs.field(init=False, default=None)
    reason: str = attrs.field(init=False, default="")
    #: What its dump is, if no other call of the process has written one of that name; and once it
    #: is written, unless another job has dumped this very call meanwhile.
    writes: Place | None = attrs.field(init=False, default=None)
    written: Place | None = attrs.field(init=False, default=None)
    #: By what journals tell it from equal calls that were generated before, and are again: it
    #: resumes none of their sessions.
    again: str = attrs.field(init=False, default="")
    #: What the record of a hit adds: source, bytes, seconds_saved.
    facts: dict[str, Any] = attrs.field(init=False, factory=dict)
    #: Of an ``async`` stage: whether it was looked for what serves it, and so was the call before.
    chosen: threading.Event | None = attrs.field(init=False, default=None)
    before: threading.Event | None = attrs.field(init=False, default=None)
    over: bool = attrs.field(init=False, default=False)
    failed: bool = attrs.field(init=False, default=False)
    ending: contextlib.ExitStack = attrs.field(init=False, factory=contextlib.ExitStack)
    #: Of several ranks: what the shards of the call have in common, and what a rank loaded, or why
    #: it could not, before the ranks agreed.
    generation: str = attrs.field(init=False, default="")
    loaded: Any = attrs.field(init=False, default=None)
    #: What it needs of each session that it resumes, once the stage runs.
    needs: Needs = attrs.field(init=False, factory=Needs)
    #: How long the stage itself ran, or the dump took to load, in seconds.
    seconds: float = attrs.field(init=False, default=0.0)

    def __enter__(self) -> Call:
        return self

    def at_end(self, act: Callable[..., object], *args: Any) -> None:
        """Run it when the call ends, or at once if it has: a thread outlives its cancelled task."""
        with _ENDING:
            if not self.over:
                self.ending.callback(act, *args)
                return
        act(*args)

    def __exit__(self, error: object, *_: object) -> None:
        with _ENDING:
            self.over, self.failed = True, error is not None
        self.ending.close()

    @functools.cached_property
    def bound(self) -> inspect.BoundArguments:
        """Its arguments, with defaults."""
        try:
            bound = self.stage.signature.bind(*self.args, **self.kwargs)
        except TypeError:  # of a decorator that forwards, and supplies some: as that takes them
            own = inspect.signature(self.stage.func, follow_wrapped=False)
            bound = own.bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return bound

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        """Its arguments by name, with defaults, and those in ``**kwargs`` last."""
        found: dict[str, Any] = self.bound.arguments
        for name, parameter in self.bound.signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                return {**found, **found[name], **found}
        return found

    @functools.cached_property
    def prompts(self) -> Any:
        """Its prompts: named, computed, or found; None if the function takes no argument."""
        named = self.stage.prompts
        if callable(named):
            return named(*self.args, **self.kwargs)
        if named is not None and named not in self.arguments:
            where = f"SkipManager.annotate(role={self.stage.role!r}, prompts={named!r})"
            remedy = f"name one of {', '.join(self.arguments)}"
            raise ConfigError(f"{self.stage.name} has no argument {named!r}", where, remedy)
        return self.arguments.get(self.holder)

    @functools.cached_property
    def holder(self) -> str:
        """The argument that holds its prompts; empty: none does.

        Where nothing names it, it is the one called `prompts`, else the first: if that is a number
        such as a step, the first that holds data.
        """
        stage = self.stage
        if stage.holder or isinstance(stage.prompts, str):
            return str(stage.holder or stage.prompts)
        arguments, parameters = self.arguments, self.bound.signature.parameters
        rest = inspect.Parameter.VAR_KEYWORD
        likely = next(itertools.filterfalse(SELF.__contains__, parameters), "")
        # Where there is nothing but ``**kwargs``, all of it is.
        if likely and parameters[likely].kind is not rest:
            if "prompts" in arguments:
                likely = "prompts"
            elif likely in IGNORED and is_single(arguments[likely]):
                own = [n for n, p in parameters.items() if p.kind is not rest and n not in SELF]
                likely = next((name for name in own if is_data(arguments[name])), likely)
        if stage.prompts is None:
            return likely
        holding = [name for name, value in arguments.items() if _holds(value, self.prompts)]
        # Prompts that are computed may be made of anything but a number or a text.
        computed = "" if is_single(arguments.get(likely)) else likely
        return min(holding or [computed], key=lambda name: name in SELF)

    @functools.cached_property
    def digests(self) -> list[str]:
        """The hash of each of its prompts, as they are before the stage, which may alter them.

        Raises UnsupportedTypeError where they cannot be compared, or nothing tells them apart.
        """
        from rlskip.format.prompt_digests import digests_of  # needs torch

        stage, given = self.stage, self.args or self.kwargs
        digests = digests_of(self.prompts, stage.prompt_groups, NEUTRAL_META)
        is_none = self.prompts is None and stage.prompts is not None and given
        is_named = stage.prompts is not None or stage.holder is not None
        last = [None, *self.bound.signature.parameters.values()][-1]
        rest = last.name if last is not None and last.kind is last.VAR_KEYWORD else ""
        names = sorted(self.arguments.keys() - {*SELF, rest})
        # A function that takes no argument is told apart by its steps.
        are_ignored = not is_named and names and {*names} <= {*IGNORED}
        is_ignored = are_ignored and (is_single(self.prompts) or self.holder == rest)
        if None not in digests and not is_none and not is_ignored:
            return cast("list[str]", digests)
        from rlskip.batch.columns import columns_of  # needs numpy

        tells = max(names, key=lambda name: name.rstrip("s").endswith("id"), default="")
        by = repr(tells) if is_ignored else "lambda ...: ..."
        names = names if is_ignored else [*map(str, columns_of(self.prompts))]
        has = f"only {', '.join(names)}, which no replay compares" if names else "no fields"
        what = f"nothing tells the prompts of {stage.name} apart: they have {has}"
        remedy = f"give them a field with their content, or name what does: annotate(prompts={by})"
        raise UnsupportedTypeError(what, "prompts", remedy)

    def explained(self, error: UnsupportedTypeError) -> UnsupportedTypeError:
        """`error`; where it is about an argument that was not named as the prompts, it says so."""
        parameters, taken = self.stage.signature.parameters.values(), self.holder
        rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        names = [p.name for p in parameters if p.kind not in rest and p.name not in SELF]
        others = [name for name in names if name != taken]
        is_told = self.stage.prompts is not None or error.remedy.endswith("')")
        if is_told or taken == "prompts" or not others or not error.where.startswith("prompts"):
            return error
        first = ", the first argument," if taken == names[0] else ""
        what = f"{error.what}; {taken!r}{first} was taken for the prompts"
        remedy = f"name the argument that holds them: annotate(prompts={others[0]!r})"
        return type(error)(what, error.where, remedy)

    def refuse_as_prompts(self, other: str) -> None:
        """Raise ConfigError if a single value was taken for the prompts, and `other` is a batch."""
        if is_single(self.prompts) or (isinstance(self.prompts, tuple) and not self.prompts):
            raise ConfigError(
                f"{self.holder!r}, which is not a batch, was taken for the prompts, and "
                f"{other!r} is too large to be compared",
                f"SkipManager.annotate of {self.stage.name}",
                f"name the argument that holds them: annotate(prompts={other!r})",
            )

    @functools.cached_property
    def prompt_rows(self) -> PromptRows | None:
        """The prompts one by one, as they are before the stage; None: they cannot be told apart."""
        from rlskip.skip.prompt_rows import PromptRows  # needs numpy

        try:
            return PromptRows.of(self.prompts, self.digests)
        except UnsupportedTypeError:
            return None

    def is_served(self, source: int, nbytes: int, took: float) -> None:
        """Note what the record says of a hit: dumps of a step, which `took` as long to generate."""
        saved = took - self.seconds if took else 0.0  # it may not be known
        self.facts.update(source=source, bytes=nbytes, seconds_saved=saved)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Measure how long the block runs."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds = time.perf_counter() - began


def _holds(value: Any, prompts: Any) -> bool:
    """Whether `value` is the prompts, or has them as an entry or an attribute."""
    if is_single(prompts):
        return False
    level = [value, type(value)]
    with contextlib.suppress(Exception):  # an object of the user's raises anything
        for _ in range(2):
            parts = [o if issubclass(type(o), dict) else attributes_of(o) for o in level]
            level += [one for some in parts if len(some) <= 256 for one in some.values()]
    return any(one is prompts for one in level)


def named(func: Callable[..., Any]) -> Any:
    """What gives a callable its name: a function, what a partial calls, or an object's class."""
    while isinstance(func, functools.partial):
        func = func.func
    return func if hasattr(func, "__qualname__") else type(func)


def signature_of(func: Callable[..., Any]) -> inspect.Signature:
    """The arguments of a callable; raises ValueError where they are not known."""
    own = inspect.signature(func, follow_wrapped=False)
    # A decorator that forwards what it gets takes what the function below it takes. One that
    # names all its arguments takes those: it may supply some itself.
    if not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in own.parameters.values()):
        return own
    below = getattr(func, "__wrapped__", None) if inspect.isfunction(func) else None
    return inspect.signature(func) if below is None else signature_of(below)
