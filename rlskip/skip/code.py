"""The code of a stage, as a digest: another one may generate other rollouts."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from rlskip.skip.stored import cells_of, classes_of, is_neutral

_CODE = (
    types.FunctionType, types.MethodType, functools.partial, functools.partialmethod, staticmethod,
    classmethod, property, functools.cached_property, type(functools.lru_cache(len)),
)  # fmt: skip
_MOST = 20  # functions whose helpers count, and functions that one list or mapping holds


def innermost(func: Any) -> Any:
    """The function that a callable runs in the end, without what decorates or binds it."""
    while True:
        if isinstance(func, functools.partial | functools.partialmethod):
            func = func.func
        elif isinstance(func, types.MethodType):
            func = func.__func__
        elif (wrapped := getattr(func, "__wrapped__", None)) is not None:
            func = wrapped
        elif isinstance(func, staticmethod | classmethod):
            func = func.__func__
        elif isinstance(func, property):
            func = func.fget
        elif isinstance(func, functools.cached_property):
            func = func.func
        elif isinstance(func, types.FunctionType):
            return func
        elif not isinstance(called := vars(type(func)).get("__call__"), types.FunctionType):
            return func  # built in, or an object without __call__ of its own
        else:
            func = called


@attrs.frozen(slots=False, eq=False)  # without slots, for the cached property
class Code:
    """The functions that a stage runs: its own, and helpers that it, or one of them, names."""

    functions: Sequence[types.FunctionType]

    @classmethod
    def of(cls, func: Callable[..., Any], owner: type | None) -> Code:
        """That of `func`, for an object of the class `owner`; without functions if it is C's.

        A helper is a function of its module or of another one of the user's, or a method there: of
        what is named, be it a class or an object, or of `owner`, which may override what the stage
        calls.
        """
        func = innermost(func)
        found = [func] if isinstance(func, types.FunctionType) else []
        for one in found:  # which grows meanwhile
            there, (_, named) = one.__globals__, names_in(one.__code__)
            seen = set[int]()
            near: list[Any] = [*cells_of(one).values(), *map(there.get, named)]
            for holder in [value for value in near if type(value) in (list, tuple, dict)]:
                near += [*(holder.values() if type(holder) is dict else holder)][:_MOST]
            for value in (owner, there.get(one.__qualname__.partition(".")[0]), *near):
                is_kind = issubclass(type(value), type | types.ModuleType)
                kind: Any = value if is_kind else type(value)
                if id(kind) not in seen and not is_neutral(kind):
                    near += _parts(kind, ("__init__", "__call__", *named))
                seen.add(id(kind))
            for value in near:
                helper = innermost(value) if issubclass(type(value), _CODE) else None
                if isinstance(helper, types.FunctionType) and len(found) <= _MOST:
                    is_users = "-packages" not in helper.__code__.co_filename
                    is_users = is_users and not is_neutral(helper)
                    is_near = is_users or helper.__module__ == func.__module__
                    if is_near and helper not in found:
                        found.append(helper)
        return cls(found)

    @functools.cached_property
    def digest(self) -> str | None:
        """``NAME, source HEX``; None for a function of rlskip's own, or without functions.

        Decorators, comments and layout do not count. ``bytecode`` stands for ``source`` where there
        is none, as in ``python -c``.
        """
        import xxhash  # a job that skips nothing needs none

        if not self.functions or f"{self.functions[0].__module__}.".startswith("rlskip."):
            return None
        try:
            kind, text = "source", "\n".join(map(_source, self.functions))
        except (OSError, TypeError):
            kind, text = "bytecode", "\n".join(_bytecode(f.__code__) for f in self.functions)
        return f"{self.functions[0].__qualname__}, {kind} {xxhash.xxh3_64_hexdigest(text.encode())}"


def _parts(kind: Any, names: Iterable[str]) -> list[Any]:
    """What a class or a module has by these names, read without calling it."""
    is_module = isinstance(kind, types.ModuleType)
    found: dict[str, Any] = {}
    for own in [vars(kind)] if is_module else [own for _, own in classes_of(kind)]:
        found = {name: own[name] for name in names if name in own} | found
    return [*found.values()]


@functools.lru_cache(1 << 10)
def names_in(code: types.CodeType) -> tuple[list[str], list[str]]:
    """The globals that a function, and those within it, read; and all names that they have."""
    codes = [code]
    for one in codes:  # which grows meanwhile
        codes += [const for const in one.co_consts if isinstance(const, types.CodeType)]
    parts = (part for one in codes for part in dis.get_instructions(one))
    read = {part.argval: None for part in parts if part.opname == "LOAD_GLOBAL"}
    return [*read], [*dict.fromkeys(name for one in codes for name in one.co_names)]


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
