"""Which arguments a callable takes, and which of them holds a call's prompts."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rlskip.errors import ConfigError
from rlskip.skip.arguments import IGNORED, is_data, is_single

_REST = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
_MAX_ENTRIES = 256


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
    first = next((name for name in kinds if name not in ("self", "cls")), "")
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
        return next((k for k, v in named.items() if k not in ("self", "cls") and is_data(v)), first)
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
