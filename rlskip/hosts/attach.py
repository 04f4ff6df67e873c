"""Attach to code that knows nothing of rlskip: wrap a function when its module is imported.

Light on purpose: plug-ins of hosts load this at the start of every process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import wrapt

from rlskip.config.attach import Target
from rlskip.errors import RlskipError

F = TypeVar("F", bound=Callable[..., Any])

# The keys of the wrappers around a function; functools.wraps carries it outwards.
_WRAPPED_BY = "_rlskip_wrapped_by"


class AttachError(RlskipError, AttributeError):
    """A module was imported and what shall be wrapped is not in it."""


def when_imported(module: str, hook: Callable[[ModuleType], None]) -> None:
    """Call ``hook(module)`` when `module` is imported, at once if it already is.

    What `hook` raises ends the import of the module.
    """
    wrapt.register_post_import_hook(hook, module)


def wrap(target: str, decorate: Callable[[F], F], *, key: str) -> None:
    """Put ``decorate(function)`` in the place of `target`, now or when its module is imported.

    Parameters
    ----------
    target
        ``package.module:function`` or ``package.module:Class.method``. Static methods and class
        methods stay what they are; an inherited method is overridden in the class named.
    decorate
        Gets the plain function, returns a function.
    key
        Names the wrapper: the same key never wraps the same function twice.

    Raises
    ------
    TargetError
        `target` is no such string.
    AttachError
        The module holds no such function; raised from the import of the module, if that comes
        later. Whoever bound the function to another name before (``from module import
        function``) keeps the bare one: then name the module that calls it.
    """
    parsed = Target.parse(target)
    when_imported(parsed.module, lambda module: _wrap_in(module, parsed, decorate, key))


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
        raise AttachError(f"{name!r} is no function: {raw!r}", str(target))
    wrapped_by = getattr(function, _WRAPPED_BY, frozenset())
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
