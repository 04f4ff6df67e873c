"""One call of a decorated function, while rlskip looks at it."""

from __future__ import annotations

import functools
import inspect
import threading
import time
import types
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import attrs

from rlskip.errors import ConfigError, RlskipError
from rlskip.jobs.served import Needs
from rlskip.skip.arguments import (
    ALL,
    IGNORED,
    NEUTRAL_META,
    Arguments,
    is_single,
    read_arguments,
)
from rlskip.skip.code import digest_of, innermost
from rlskip.skip.hidden import SELF, FirstValues, add_hidden
from rlskip.skip.signatures import bind, by_name, holds, likely_prompts, named, signature_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlskip.skip.prompt_rows import PromptRows
    from rlskip.skip.run_dumps import PromptGroups
    from rlskip.skip.step_calls import Key
    from rlskip.store import UnsupportedTypeError

PromptsSpec = str | Callable[..., Any] | None
IdentitySpec = Mapping[str, Any] | Callable[..., Mapping[str, Any]] | None
LacksSpec = Callable[[Any], Sequence[str]] | None
RowsSpec = Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] | None


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
    #: The argument in which `prompts`, a function, finds them, if that is known.
    holder: str | None = None

    @property
    def name(self) -> str:
        return f"{named(self.func).__module__}.{named(self.func).__qualname__}"

    @functools.cached_property
    def _signature(self) -> inspect.Signature:
        return signature_of(self.func)

    @functools.cached_property
    def code(self) -> str | None:
        """A digest of its code; None where that is not known."""
        return digest_of(self.func)

    def ignored_of(self, call: Call, more: Collection[str] = ()) -> frozenset[str]:
        """The names of the arguments of a call that are not compared."""
        whole = [] if callable(self.prompts) else [self._holder(call)]
        return frozenset((*IGNORED, *(self.ignore or ()), *more, *whole))

    @functools.cached_property
    def _whole_signature(self) -> inspect.Signature:
        """Of a partial's function: what the partial gives it counts, too."""
        func = self.func
        return signature_of(func.func if isinstance(func, functools.partial) else func)

    def arguments_of(
        self, call: Call, ignored: Collection[str], first: FirstValues
    ) -> Arguments | None:
        """What counts of a call besides its prompts: arguments, and attributes that shape rollouts.

        None where they are not known.
        """
        if self.ignore is None:
            return None
        func, args, kwargs = self.func, call.args, call.kwargs
        if isinstance(func, functools.partial):
            args, kwargs = (*func.args, *args), {**func.keywords, **kwargs}
            func = func.func
        bound, holder = bind(self._whole_signature, func, args, kwargs), self._holder(call)
        found = read_arguments(bound, ignored, call.prompts, holder)
        if ALL not in ignored:
            roots = {n: v for n, v in by_name(bound).items() if n in (*SELF, holder)}
            if (owner := getattr(func, "__self__", None)) is not None:
                func, roots["self"] = getattr(func, "__func__", func), owner
            elif not isinstance(func, types.FunctionType):
                roots["self"] = func
            if roots.get(holder) is call.prompts:
                del roots[holder]
            add_hidden(found, roots, func, call.prompts, ignored, first)
        if self.prompts is None and found.large and holder != "prompts":
            self._refuse_as_prompts(call.prompts, holder, found.large[0])
        return found

    def _refuse_as_prompts(self, prompts: Any, taken: str, other: str) -> None:
        """Raise ConfigError if a single value was taken for the prompts, and `other` is a batch."""
        if is_single(prompts) or (isinstance(prompts, tuple) and not prompts):
            raise ConfigError(
                f"{taken!r}, which is not a batch, was taken for the prompts, and "
                f"{other!r} is too large to be compared",
                f"SkipManager.annotate of {self.name}",
                f"name the argument that holds them: annotate(prompts={other!r})",
            )

    def refuse_unknown_names(self) -> None:
        """Raise ConfigError unless the function has the arguments in `ignore` and `holder`."""
        parameters = self._whole_signature.parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return
        names = [*(self.ignore or ()), *([self.holder] if self.holder else [])]
        cells = getattr(getattr(innermost(self.func), "__code__", None), "co_freevars", ())
        known = (ALL, *SELF, *parameters, *cells)
        if unknown := [name for name in names if name.partition(".")[0] not in known]:
            raise ConfigError(
                f"{self.name} has no argument {', '.join(unknown)}",
                f"SkipManager.annotate(role={self.role!r}, ignore=...)",
                f"name some of {', '.join(parameters)}",
            )

    def prompts_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The prompts argument: named, computed, or found (:func:`likely_prompts`).

        None when the function takes no argument at all.
        """
        if callable(self.prompts):
            return self.prompts(*args, **kwargs)
        bound = self._bound(args, kwargs)
        name, arguments = self.prompts or likely_prompts(bound), by_name(bound)
        if self.prompts is not None and name not in arguments:
            raise ConfigError(
                f"{self.name} has no argument {name!r}",
                f"SkipManager.annotate(role={self.role!r}, prompts={name!r})",
                f"name one of {', '.join(arguments)}",
            )
        return arguments.get(name)

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        bound = bind(self._signature, self.func, args, kwargs)
        bound.apply_defaults()
        return bound

    def _holder(self, call: Call) -> str:
        """The argument that holds the prompts; empty: none does."""
        if self.holder or isinstance(self.prompts, str):
            return str(self.holder or self.prompts)
        bound = self._bound(call.args, call.kwargs)
        taken, arguments = likely_prompts(bound), by_name(bound)
        if self.prompts is None:
            return taken
        holding = [name for name, value in arguments.items() if holds(value, call.prompts)]
        # Prompts that are computed may be made of anything but a number or a text.
        computed = "" if is_single(arguments.get(taken)) else taken
        return min(holding or [computed], key=lambda name: name in ("self", "cls"))

    def explained(self, call: Call, error: UnsupportedTypeError) -> UnsupportedTypeError:
        """`error`; where it is about an argument that was not named as the prompts, it says so."""
        taken, of_prompts = self._holder(call), error.where.startswith("prompts")
        names = [name for name in self._signature.parameters if name not in ("self", "cls")]
        others = [name for name in names if name != taken]
        if self.prompts is not None or taken == "prompts" or not others or not of_prompts:
            return error
        return type(error)(
            f"{error.what}; {taken!r}{', the first argument,' * (taken == names[0])} was taken for "
            "the prompts",
            error.where,
            f"name the argument that holds them: annotate(prompts={others[0]!r})",
        )

    def takes_only_ignored(self, call: Call) -> bool:
        """Whether the function has arguments, and all are such as are never compared.

        One that takes none is told apart by its steps.
        """
        names = [name for name in self._signature.parameters if name not in ("self", "cls")]
        return (
            self.prompts is None and bool(names) and self.holder is None
            and all(name in IGNORED for name in names) and is_single(call.prompts)
        )  # fmt: skip

    def nothing_to_tell_by(self, call: Call) -> UnsupportedTypeError:
        """The error for prompts all of whose names are such as are never compared."""
        from rlskip.batch.columns import columns_of
        from rlskip.format.dump_errors import UnsupportedTypeError

        names, by = [str(name) for name in columns_of(call.prompts)], "lambda ...: ..."
        if self.takes_only_ignored(call):
            names = [name for name in self._signature.parameters if name not in ("self", "cls")]
            by = repr(names[-1])
        has = f"only {', '.join(names)}, which no replay compares" if names else "no fields"
        return UnsupportedTypeError(
            f"nothing tells the prompts of {self.name} apart: they have {has}",
            "prompts",
            f"give them a field with their content, or name what does: annotate(prompts={by})",
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


@attrs.define(eq=False, slots=False)  # without slots, for the cached property
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
    found: Key | PromptGroups | None = attrs.field(init=False, default=None)
    #: What the ledger knows of that.
    parts: Sequence[Hashable] = attrs.field(init=False, default=())
    #: Its place among the calls of the visit, and its name among those of the step.
    place: int = attrs.field(init=False, default=0)
    name: str = attrs.field(init=False, default="")
    #: Whether nobody calls a decorated function: its role is asked by hand, and remembers nothing.
    by_hand: bool = attrs.field(init=False, default=False)
    #: The name of the dump that its own replaces, if any, and why no dump serves it.
    replaces: str | None = attrs.field(init=False, default=None)
    reason: str = attrs.field(init=False, default="")
    #: What its dump is, if no other call of the process has written one of that name.
    writes: Key | None = attrs.field(init=False, default=None)
    #: By what journals tell it from equal calls that were generated before, and are again: it
    #: resumes none of their sessions.
    again: str = attrs.field(init=False, default="")
    #: What it needs of each session that it resumes.
    needs: Needs = attrs.field(
        init=False, default=attrs.Factory(lambda s: Needs(s.stage.lacks), takes_self=True)
    )
    #: Whether another job has dumped this very call meanwhile, and what it dumped stays.
    is_dropped: bool = attrs.field(init=False, default=False)
    #: Writes an event to the job's records: ``record("dumped", bytes=...)``.
    record: Callable[..., None] = lambda event, **facts: None
    #: What the record of a hit adds: source, bytes, seconds_saved.
    facts: dict[str, Any] = attrs.field(init=False, factory=dict)
    #: Releases what the call holds.
    cleanup: Cleanup = attrs.field(init=False, factory=Cleanup)
    #: Of several ranks: what the shards of the call have in common.
    generation: str = attrs.field(init=False, default="")
    #: What a rank loaded, or why it could not, before the ranks agreed.
    loaded: Any = attrs.field(init=False, default=None)
    #: What the stage, a plain function, returned: ``coroutine``, ``task``; empty: its result.
    awaited: str = attrs.field(init=False, default="")
    #: How long the stage itself ran, or the dump took to load, in seconds.
    seconds: float = attrs.field(init=False, default=0.0)

    @functools.cached_property
    def digests(self) -> list[str]:
        """The hash of each of its prompts, as they are before the stage, which may alter them.

        Raises
        ------
        UnsupportedTypeError
            They cannot be compared, or nothing tells them apart.
        """
        from rlskip.format.prompt_digests import (
            digests_of,  # a job that skips nothing needs no torch
        )

        digests = digests_of(self.prompts, self.stage.prompt_groups, NEUTRAL_META)
        told = [digest for digest in digests if digest is not None]
        if len(told) < len(digests) or self.stage.takes_only_ignored(self):
            raise self.stage.nothing_to_tell_by(self)
        return told

    def summarize_prompts(self) -> PromptRows | None:
        """The prompts one by one, as a dump records them; None if they cannot be taken apart."""
        from rlskip.format.dump_errors import UnsupportedTypeError
        from rlskip.skip.prompt_rows import PromptRows

        try:
            return PromptRows.of(self.prompts, self.digests)
        except UnsupportedTypeError:
            return None

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
