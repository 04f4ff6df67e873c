"""Functions of other people's modules, wrapped when their module is imported.

This module imports nothing heavy: plug-ins of hosts load it at the start of every process.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, TypeVar

import attrs
import wrapt

from rlskip.errors import ConfigError, RlskipError

F = TypeVar("F", bound=Callable[..., Any])

# The keys of the wrappers around a function; functools.wraps copies it to the outer one.
_WRAPPED_BY = "_rlskip_wrapped_by"


class AttachError(RlskipError, AttributeError):
    """A function to wrap, or the path of an argument, does not exist."""


def version_of(package: str) -> str | None:
    """The leading numbers of a package's version, 0.9.1; None without it.

    An imported package states its own: a source tree on the path has no metadata.
    """
    from importlib import metadata  # which takes milliseconds of a start

    version = getattr(sys.modules.get(package), "__version__", None)
    try:
        version = str(version or metadata.version(package))
    except metadata.PackageNotFoundError:
        return None
    found = re.match(r"\d+(\.\d+)*", version)
    return found[0] if found else None


def when_imported(module: str, hook: Callable[[ModuleType], None]) -> None:
    """Call ``hook(module)`` when `module` is imported, at once if it already is."""
    wrapt.register_post_import_hook(hook, module)


def wrap(target: str, decorate: Callable[[F], F], *, key: str) -> None:
    """Replace `target` by ``decorate(function)``, now or when its module is imported.

    `target` is ``package.module:function`` or ``package.module:Class.method``. Static and class
    methods stay such; an inherited method is overridden in the named class. What was imported by
    name before (``from module import function``) stays unwrapped. One `key` wraps a function at
    most once. Raises ConfigError where `target` is not such a string, and AttachError where the
    module has no such function: by the import of the module if that comes later.
    """
    module, _, path = target.partition(":")
    if not all(name.isidentifier() for name in f"{module}.{path}".split(".")):
        remedy = "write package.module:Class.method or package.module:function"
        raise ConfigError(f"{target!r} does not name a function", remedy=remedy)
    when_imported(module, lambda module: wrap_in(module, target, decorate, key))


@attrs.frozen
class Seam:
    """A place of a trainer that a host depends on: a row of the host's table.

    `target` is that of :func:`wrap`, and `purpose` what rlskip does there: "rlskip <purpose>".
    `feature` is off without it; empty: it is required, and the import of its module fails. The
    first step of `role` calls it, or another one with this purpose; empty: not each run does.
    `decorated` says whether the trainer decorates it, with a decorator that the host replaces.
    """

    target: str
    purpose: str
    feature: str = ""
    role: str = ""
    decorated: bool = False

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def path(self) -> str:
        return self.target.partition(":")[2]


class Seams:
    """A host's table of seams, and what the host's modules run in their place.

    A seam without a body is only looked up. `trainer` is the distribution that has them, for
    messages. ``missing`` has the errors of optional seams that this release does not have, by their
    targets, and ``called`` the seams of a role that were called.
    """

    def __init__(self, trainer: str, table: Iterable[Seam]) -> None:
        self.table = {seam.target: seam for seam in table}
        self.missing: dict[str, AttachError] = {}
        self.called: set[str] = set()
        self._trainer = trainer
        self._bodies: dict[str, Callable[..., Any]] = {}
        self._given: dict[str, Callable[[Any], None]] = {}

    def decorated(self, *targets: str) -> Callable[[F], F]:
        """Declare the decorator of `targets`, which are rows of the table."""

        def declare(decorate: F) -> F:
            for target in targets:
                self._bodies[self.table[target].target] = decorate
            return decorate

        return declare

    def around(self, *targets: str) -> Callable[[F], F]:
        """Declare the body that is called around `targets`, as :func:`around` has it."""

        def declare(body: F) -> F:
            self.decorated(*targets)(around(body))
            return body

        return declare

    def on_import(self, target: str) -> Callable[[Callable[[Any], None]], None]:
        """Declare a function that is given `target`, of any kind, when its module is imported."""
        return functools.partial(self._given.__setitem__, target)

    def attach(self) -> None:
        """Wrap the seams when their modules are imported. Imports none of them.

        The import of a module that lacks a required one raises AttachError.
        """
        for seam in self.table.values():
            when_imported(seam.module, functools.partial(self._attach, seam))

    def marked(self, target: str, decorate: Callable[..., Any]) -> Callable[..., Any]:
        """`decorate` for what takes the place of `target`, which is noted when it is called."""

        @around
        def noting(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.called.add(target)
            return function(*args, **kwargs)

        def mark(function: Any) -> Any:
            made = decorate(function)
            # Around the body: one that replays does not call what it is in the place of.
            made = noting(made) if self.table[target].role else made
            setattr(made, _WRAPPED_BY, getattr(made, _WRAPPED_BY, frozenset()) | {target})
            return made

        return mark

    def require(self, feature: str) -> None:
        """Raise the AttachError of a missing seam without which `feature` is off."""
        for target, error in self.missing.items():
            if self.table[target].feature == feature:
                raise error

    def off(self) -> dict[str, str]:
        """What is off in this release, each with what it lacks."""
        lost = [(self.table[target].feature, target) for target in self.missing]
        return {feature: ", ".join(t for f, t in lost if f == feature) for feature, _ in lost}

    def uncalled(self, role: str) -> list[Seam]:
        """The seams of `role` that were not called, and no other of that purpose either."""
        called = {self.table[target].purpose for target in self.called}
        of_role = (seam for seam in self.table.values() if seam.role == role)
        return [seam for seam in of_role if seam.purpose not in called]

    def _attach(self, seam: Seam, module: ModuleType) -> None:
        try:
            owner, _ = _look_up(module, seam.target)
            if (decorate := self._bodies.get(seam.target)) is not None:
                wrap_in(module, seam.target, self.marked(seam.target, decorate), seam.target)
            found = getattr(owner, seam.path.rpartition(".")[2])
            if (body := self._given.get(seam.target)) is not None:
                body(found)
            if seam.decorated and seam.target not in getattr(found, _WRAPPED_BY, ()):
                raise AttachError("rlskip's decorator did not reach it", seam.target)
        except AttachError as error:
            self._lose(seam, error)
        except ImportError as error:  # of what a body takes from the trainer
            self._lose(seam, AttachError(str(error), seam.target))

    def _lose(self, seam: Seam, error: AttachError) -> None:
        release = f"{self._trainer} {version_of(self._trainer) or '?'}"
        lost = AttachError(
            f"{release} is another than rlskip knows: {error.what}; rlskip {seam.purpose} there",
            seam.target,
            error.remedy,
        )
        if not seam.feature:
            raise lost from error
        self.missing[seam.target] = lost


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


def wrap_in(module: ModuleType, target: str, decorate: Callable[[F], F], key: str) -> None:
    """Wrap `target` in its `module`, which is imported; the others are those of :func:`wrap`."""
    owner, raw = _look_up(module, target)
    owners, _, name = target.partition(":")[2].rpartition(".")
    if not isinstance(owner, ModuleType | type):
        of = f"{type(owner).__module__}:{type(owner).__qualname__}.{name}"
        raise AttachError(f"{owners!r} is an object, not a class", target, f"name {of}")
    bound = isinstance(raw, (staticmethod, classmethod))
    function: Any = raw.__func__ if bound else raw
    if not inspect.isroutine(function):
        raise AttachError(f"{name!r} is not a function: {raw!r}", target)
    wrapped_by: frozenset[str] = getattr(function, _WRAPPED_BY, frozenset())
    if key not in wrapped_by:
        wrapped = decorate(function)  # type: ignore[arg-type]
        setattr(wrapped, _WRAPPED_BY, wrapped_by | {key})
        setattr(owner, name, type(raw)(wrapped) if bound else wrapped)


def _look_up(module: ModuleType, target: str) -> tuple[Any, Any]:
    """The owner of `target`, and what it holds of that name; raises AttachError without."""
    owner: Any = module
    names = target.partition(":")[2].split(".")
    for depth, name in enumerate(names, 1):
        # As it was defined: getattr would bind a class method and unpack a static one.
        look = inspect.getattr_static if depth == len(names) else getattr
        found = look(owner, name, None)
        if found is None or found is getattr(object, name, None):  # each class has an `__init__`
            above = ".".join(names[: depth - 1])
            place = f"{module.__name__}:{above}" if above else f"module {module.__name__}"
            file = getattr(module, "__file__", None) or "built in"
            remedy = f"is it another version? The module is {file}"
            raise AttachError(f"{place} has no {name!r}", target, remedy)
        if depth < len(names):
            owner = found
    return owner, found
