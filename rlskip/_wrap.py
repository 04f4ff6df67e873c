"""Functions of other people's modules, wrapped when their module is imported.

This module imports nothing heavy: plug-ins of hosts load it at the start of every process.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import wrapt

from rlskip._compat import gets_self
from rlskip.config.attachments import Target
from rlskip.errors import RlskipError

F = TypeVar("F", bound=Callable[..., Any])

# The keys of the wrappers around a function; functools.wraps copies it to the outer one.
_WRAPPED_BY = "_rlskip_wrapped_by"


class AttachError(RlskipError, AttributeError):
    """A function to wrap, or the path of an argument, does not exist."""


def when_imported(module: str, hook: Callable[[ModuleType], None]) -> None:
    """Call ``hook(module)`` when `module` is imported, at once if it already is.

    What `hook` raises ends the import of the module.
    """
    wrapt.register_post_import_hook(hook, module)


def wrap(
    target: str,
    decorate: Callable[[F], F],
    *,
    key: str,
    missing: list[AttachError] | None = None,
) -> None:
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
    missing
        Where to note the error of a function that does not exist; None: it is raised.

    Raises
    ------
    ConfigError
        `target` is not such a string.
    AttachError
        The module has no such function; raised by the import of the module if that comes later.
        A module that imported the function by name before (``from module import function``)
        keeps the unwrapped one: name that module instead.
    """
    parsed = Target.parse(target)

    def hook(module: ModuleType) -> None:
        try:
            wrap_in(module, parsed, decorate, key)
        except AttachError as error:
            if missing is None:
                raise
            missing.append(error)

    when_imported(parsed.module, hook)


class Seams:
    """The functions of a trainer that one module wraps, each declared at what runs in its place.

    Parameters
    ----------
    key
        As for :func:`wrap`.
    optional
        Whether a release may lack some of them; the errors are then in :attr:`missing`.
    """

    def __init__(self, key: str, *, optional: bool = False) -> None:
        self.missing: list[AttachError] = []
        self._key = key
        self._optional = optional
        self._seams: list[tuple[str, Callable[..., Any]]] = []

    def decorated(self, *targets: str) -> Callable[[F], F]:
        """Declare a decorator of `targets`."""

        def declare(decorate: F) -> F:
            self._seams += [(target, decorate) for target in targets]
            return decorate

        return declare

    def around(self, *targets: str) -> Callable[[F], F]:
        """Declare a body that is called around `targets`, as :func:`around` has it."""

        def declare(body: F) -> F:
            self.decorated(*targets)(around(body))
            return body

        return declare

    def attach(self) -> None:
        """Wrap the targets when their modules are imported. Imports none of them."""
        for target, decorate in self._seams:
            wrap(target, decorate, key=self._key, missing=self.missing if self._optional else None)


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


def wrap_in(module: ModuleType, target: Target, decorate: Callable[[F], F], key: str) -> None:
    """Wrap `target` in its `module`, which is imported; the others are those of :func:`wrap`."""
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
    if not isinstance(owner, ModuleType | type) and name not in getattr(owner, "__dict__", ()):
        of = f"{type(owner).__module__}:{type(owner).__qualname__}.{name}"
        raise AttachError(f"{owners[-1]!r} is an object, not a class", str(target), f"name {of}")
    bound = isinstance(raw, (staticmethod, classmethod))
    function = raw.__func__ if bound else raw
    kind: Any = type(raw) if bound else None
    if isinstance(owner, type) and not gets_self(raw):
        kind = staticmethod  # such as a partial: it gets no self
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
