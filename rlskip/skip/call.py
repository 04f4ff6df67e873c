"""One call of a decorated function, while rlskip looks at it."""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import attrs

from rlskip.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

_current: ContextVar[Call] = ContextVar("rlskip_call")

PromptsSpec = str | Callable[..., Any] | None
IdentitySpec = Mapping[str, Any] | Callable[..., Mapping[str, Any]] | None


@attrs.frozen(eq=False, slots=False)  # without slots, for the cached property
class Stage:
    """A decorated function: what ``SkipManager.annotate`` was told about it."""

    func: Callable[..., Any]
    role: str
    prompts: PromptsSpec = None
    identity: IdentitySpec = None
    #: Keyword options that only the role understands (``BaseSkip.stage_options``).
    options: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def name(self) -> str:
        return f"{self.func.__module__}.{self.func.__qualname__}"

    @functools.cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.func)

    def prompts_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The prompts argument: named, computed, or found (`prompts`, else the first).

        None when the function takes no argument at all.
        """
        if callable(self.prompts):
            return self.prompts(*args, **kwargs)
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if isinstance(self.prompts, str):
            if self.prompts not in bound.arguments:
                raise ConfigError(
                    f"{self.name} has no argument {self.prompts!r}",
                    f"SkipManager.annotate(role={self.role!r}, prompts={self.prompts!r})",
                    f"name one of {', '.join(bound.arguments)}",
                )
            return bound.arguments[self.prompts]
        if "prompts" in bound.arguments:
            return bound.arguments["prompts"]
        return next((v for k, v in bound.arguments.items() if k not in ("self", "cls")), None)

    def identity_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        if callable(self.identity):
            return self.identity(*args, **kwargs)
        return self.identity or {}


class Cleanup(ExitStack):
    """What is to be done when a call ends, however it ends; what is added after that, at once.

    After that, because a thread goes on when the task that waits for it is cancelled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.over = False
        self._lock = threading.Lock()

    def add(self, act: Callable[[], object]) -> None:
        with self._lock:
            if not self.over:
                self.callback(act)
                return
        act()

    def __exit__(self, *error: Any) -> bool | None:
        with self._lock:
            self.over = True
        return super().__exit__(*error)


@attrs.define(eq=False)
class Call:
    """What is known of one call; lives exactly as long as the call does."""

    stage: Stage
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    prompts: Any = attrs.field(
        init=False,
        default=attrs.Factory(lambda s: s.stage.prompts_of(s.args, s.kwargs), takes_self=True),
    )
    #: What the role computed of the prompts before the stage ran (a stage may alter its input).
    identity: Any = attrs.field(init=False, default=None)
    #: Takes down an event in the job's records: ``record("dumped", bytes=...)``.
    record: Callable[..., None] = lambda event, **facts: None
    #: What to record beside a hit: source, bytes, seconds_saved.
    facts: dict[str, Any] = attrs.field(init=False, factory=dict)
    #: What must be given back when the call ends, however it ends.
    cleanup: Cleanup = attrs.field(init=False, factory=Cleanup)
    _generation_began: float = attrs.field(init=False, factory=time.perf_counter)

    def replace_prompts(self, prompts: Any) -> bool:
        """Have the stage called with `prompts` instead; False where no argument is the prompts."""
        args = tuple(prompts if arg is self.prompts else arg for arg in self.args)
        kwargs = {k: prompts if arg is self.prompts else arg for k, arg in self.kwargs.items()}
        old, new = [*self.args, *self.kwargs.values()], [*args, *kwargs.values()]
        if all(a is b for a, b in zip(old, new, strict=True)):
            return False
        self.args, self.kwargs = args, kwargs
        return True

    def generation_begins(self) -> None:
        self._generation_began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the stage itself was started."""
        return time.perf_counter() - self._generation_began

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this the call that :func:`current_call` returns."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


def current_call(func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Call:
    """The call under way; outside the manager (a role used by hand) a fresh one."""
    call = _current.get(None)
    return call if call is not None else Call(Stage(func, role=""), args, kwargs)


def is_validation(prompts: Any) -> bool:
    """Whether the prompts' meta says ``validate``.

    Looked for where trainers keep it: DataProto's `meta_info`, a non-tensor entry of a
    TensorDict, a key of a mapping or of its `meta_info`. One flag for each row must be true for
    all; a string says nothing.
    """
    return any(
        _is_true(unwrapped(place.get("validate", None)))
        for place in (meta_of(prompts), prompts)
        if place is not None and hasattr(place, "get")
    )


def meta_of(prompts: Any) -> Mapping[str, Any] | None:
    """The prompts' `meta_info`: DataProto's, or an entry of a mapping or a TensorDict."""
    meta = getattr(prompts, "meta_info", None)
    if meta is None and hasattr(prompts, "get"):
        meta = prompts.get("meta_info", None)
        meta = getattr(meta, "data", meta)  # NonTensorData
    return meta if isinstance(meta, Mapping) else None


def unwrapped(value: Any) -> Any:
    """Tensors, arrays, numpy's scalars and what a TensorDict wraps, as plain Python."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_true(flag: Any) -> bool:
    if isinstance(flag, list | tuple):
        return bool(flag) and all(map(_is_true, flag))
    return isinstance(flag, int | float) and bool(flag)
