"""The code of a stage, as a digest: another one may generate other rollouts."""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

_CODE = (types.FunctionType, types.MethodType, functools.partial, staticmethod, classmethod)
_MOST = 20  # functions whose helpers count


def innermost(func: Any) -> Any:
    """The function that a callable runs in the end, without what decorates or binds it."""
    while True:
        if isinstance(func, functools.partial):
            func = func.func
        elif isinstance(func, types.MethodType):
            func = func.__func__
        elif (wrapped := getattr(func, "__wrapped__", None)) is not None:
            func = wrapped
        elif isinstance(func, staticmethod | classmethod):
            func = func.__func__
        elif isinstance(func, types.FunctionType):
            return func
        elif not isinstance(called := vars(type(func)).get("__call__"), types.FunctionType):
            return func  # built in, or an object without __call__ of its own
        else:
            func = called


def digest_of(func: Callable[..., Any]) -> str | None:
    """``NAME, source HEX`` of a stage's function; None for one of rlskip's own, or without code.

    Functions of the same module that it names count, too, and methods of its class. Decorators,
    comments and layout do not. ``bytecode`` stands for ``source`` where there is none, as in
    ``python -c``.
    """
    import xxhash  # a job that skips nothing needs none

    func = innermost(func)
    if not isinstance(func, types.FunctionType) or f"{func.__module__}.".startswith("rlskip."):
        return None
    functions = _with_helpers(func)
    try:
        kind, text = "source", "\n".join(map(_source, functions))
    except (OSError, TypeError):
        kind, text = "bytecode", "\n".join(_bytecode(one.__code__) for one in functions)
    return f"{func.__qualname__}, {kind} {xxhash.xxh3_64_hexdigest(text.encode())}"


def _with_helpers(func: types.FunctionType) -> list[types.FunctionType]:
    """A function, and those of its module and class that it, or one of them, names."""
    found = [func]
    for one in found:
        there = one.__globals__
        owner = there.get(one.__qualname__.partition(".")[0])
        named = [name for code in _codes(one.__code__) for name in code.co_names]
        near: list[Any] = [*cells_of(one).values(), *map(there.get, named)]
        near += map(vars(owner).get, named) if isinstance(owner, type) else ()
        for value in near:
            value = value.fget if type(value) is property else value
            helper = innermost(value) if issubclass(type(value), _CODE) else None
            if isinstance(helper, types.FunctionType) and helper not in found[:_MOST]:
                found += [helper] if helper.__module__ == func.__module__ else []
        if len(found) > _MOST:
            break
    return found


def cells_of(func: types.FunctionType) -> dict[str, Any]:
    """What the closure of a function holds."""
    found = {}
    for name, cell in zip(func.__code__.co_freevars, func.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is not set yet
            found[name] = cell.cell_contents
    return found


@functools.lru_cache(1 << 10)
def globals_in(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a function, and those within it, read."""
    parts = (part for one in _codes(code) for part in dis.get_instructions(one))
    return tuple({part.argval: None for part in parts if part.opname == "LOAD_GLOBAL"})


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function, and of those within it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


def _source(func: types.FunctionType) -> str:
    """The source of a function; raises OSError without."""
    text = textwrap.dedent(inspect.getsource(func))
    try:
        (tree,) = ast.parse(text).body
    except (SyntaxError, ValueError):  # a lambda within a call
        return text
    if isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef):
        tree.decorator_list = []
    return ast.unparse(tree)


def _bytecode(code: types.CodeType) -> str:
    consts = [_bytecode(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {consts} {code.co_names}"
