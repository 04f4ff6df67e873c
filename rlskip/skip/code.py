"""The code of a stage, as a digest: another one may generate other rollouts."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any


def innermost(func: Callable[..., Any]) -> Any:
    """The function that a callable runs in the end, without what decorates or binds it."""
    while True:
        if isinstance(func, functools.partial):
            func = func.func
        elif isinstance(func, types.MethodType):
            func = func.__func__
        elif (wrapped := getattr(func, "__wrapped__", None)) is not None:
            func = wrapped
        elif isinstance(func, types.FunctionType):
            return func
        elif not isinstance(called := vars(type(func)).get("__call__"), types.FunctionType):
            return func  # built in, or an object without __call__ of its own
        else:
            func = called


def digest_of(func: Callable[..., Any]) -> str | None:
    """``NAME, source HEX`` of a stage's function; None for one of rlskip's own, or without code.

    Decorators, comments and layout do not count. ``bytecode`` stands for ``source`` where there is
    none, as in ``python -c``.
    """
    import xxhash  # a job that skips nothing needs none

    func = innermost(func)
    if not isinstance(func, types.FunctionType) or f"{func.__module__}.".startswith("rlskip."):
        return None
    try:
        kind, text = "source", _source(func)
    except (OSError, TypeError):
        kind, text = "bytecode", _bytecode(func.__code__)
    return f"{func.__qualname__}, {kind} {xxhash.xxh3_64_hexdigest(text.encode())}"


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
