"""The code of a stage, as a digest: another one may generate other rollouts."""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import attrs

from rlskip.skip import stored
from rlskip.skip.plain import plain_or_not
from rlskip.skip.stored import attributes_of, is_neutral, kind_of, type_of

_MOST_FUNCTIONS, _MOST_OBJECTS = 64, 512
# Methods that are called without their names.
_BY_SYNTAX = ("__call__", "__new__", "__enter__", "__aenter__", "__getitem__", "__iter__")
_MOST = 20  # parts of a list or a mapping


def _below(value: Any) -> list[Any]:
    """What a callable passes its calls on to; empty for a function that decorates none."""
    if kind_of(type_of(value)) == "holder":
        below = [stored.passed_on(value)]
    else:
        called = vars(type_of(value)).get("__call__")
        below = [called if isinstance(called, types.FunctionType) else None]
        below.append(attributes_of(value).get("__wrapped__"))
    return [one for one in below if one is not None]


class Names(NamedTuple):
    """What the code of a function, and of those within it, names."""

    read: Sequence[str]  # globals
    every: frozenset[str]  # attributes, too
    texts: Sequence[str]  # its constants
    modules: Sequence[str]  # what it imports, unless it is neutral


def _names_of(func: types.FunctionType) -> Names:
    return _names_in(func.__code__, func.__globals__.get("__package__") or "")


@functools.lru_cache(1 << 10)
def _names_in(code: types.CodeType, package: str) -> Names:
    codes = [code]
    for one in codes:  # which grows meanwhile
        codes += [const for const in one.co_consts if isinstance(const, types.CodeType)]
    read, modules = dict[str, None](), dict[str, None]()
    for one in codes:
        level = taken = 0  # of an import: how far up, and which names of the module
        # In code of more than 255 names, the number of one is in two instructions.
        for part in (part for part in dis.get_instructions(one) if part.opname != "EXTENDED_ARG"):
            if part.opname == "LOAD_GLOBAL":
                read[part.argval] = None
            elif part.opname == "IMPORT_NAME":
                with contextlib.suppress(ImportError):  # beyond the package
                    name = importlib.util.resolve_name("." * level + part.argval, package)
                    if not is_neutral(name):
                        modules[name] = None
            level, taken = taken, part.argval
    texts = [text for one in codes for text in one.co_consts if isinstance(text, str)]
    every = frozenset(name for one in codes for name in one.co_names)
    return Names([*read], every, texts, [*modules])


@attrs.frozen(slots=False, eq=False)  # without slots, for the cached property
class Code:
    """The functions that a stage runs: its own, and helpers that it, or one of them, names.

    The first `own` are the stage's function and what decorates it. Not `is_whole`: more are named.
    """

    functions: Sequence[types.FunctionType]
    own: int = 0
    is_whole: bool = True

    @classmethod
    def of(cls, func: Callable[..., Any], objects: Iterable[Any]) -> Code:
        """That of `func`, called with these objects; without functions if it is C's.

        A helper is a function of its module or of another one of the user's. It is reached from
        globals, closures, imports and `objects` by the names in the code: what objects, classes,
        modules, lists and mappings store, step by step.
        """
        layers = [func]  # what binds or decorates the function, then itself
        for one in layers:  # which grows meanwhile
            layers += _below(one) if len(layers) < _MOST else []
        found = [one for one in layers[::-1] if isinstance(one, types.FunctionType)]
        found = found[:1] + [one for one in found[1:] if _is_users(one)]
        own, met = len(found), {id(one): one for one in (func, *objects)}
        for one in found:  # which grows meanwhile
            names, there = _names_of(one), one.__globals__
            known = [*map(there.get, names.read), *map(sys.modules.get, names.modules)]
            near = [*met.values(), *stored.cells_of(one).values(), *known]
            if isinstance(around := there.get(one.__qualname__.partition(".")[0]), type):
                near.append(around)  # of a method its class, no function around it
            seen = set[int]()
            for value in near:  # which grows meanwhile
                if id(value) in seen:
                    continue
                seen.add(id(value))
                if type(value) is types.FunctionType:
                    is_near = value.__globals__ is found[0].__globals__ or _is_users(value)
                    found += [value] if is_near and value not in found else []
                with contextlib.suppress(Exception):  # an object of the user's raises anything
                    if parts := _parts(value, names.every):
                        near += parts
                        met[id(value)] = value
                if len(found) > _MOST_FUNCTIONS or len(near) > _MOST_OBJECTS:
                    return cls(found[:_MOST_FUNCTIONS], own, is_whole=False)
        return cls(found, own)

    @functools.cached_property
    def names(self) -> list[Names]:
        """Of each of the functions what it names."""
        return [*map(_names_of, self.functions)]

    @functools.cached_property
    def named(self) -> set[str]:
        """The names of attributes and entries that it may read."""
        return {name for names in self.names for name in (*names.every, *names.texts)}

    @functools.cached_property
    def reads(self) -> set[str]:
        """What a place that it reads may begin with."""
        found = {"os"}  # its environment
        for one, names in zip(self.functions, self.names, strict=True):
            modules = {name.partition(".")[0] for name in (str(one.__module__), *names.modules)}
            found |= {one.__name__, *one.__code__.co_freevars, *names.every, *modules}
        return found

    @functools.cached_property
    def digest(self) -> str | None:
        """``NAME, INTERPRETER HEX``; None for a function of rlskip's own, or without functions.

        It is of Python's code, so neither comments and layout count, nor how a decorator is called.
        """
        import xxhash  # a job that skips nothing needs none

        if not self.functions or f"{self.functions[0].__module__}.".startswith("rlskip."):
            return None
        texts = []
        for one in self.functions:
            usual = [*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
            texts.append(f"{_text_of(one.__code__)} {[plain_or_not(part)[0] for part in usual]}")
        digest = xxhash.xxh3_64_hexdigest("\n".join(sorted(texts)).encode())
        return f"{self.functions[0].__qualname__}, {sys.implementation.cache_tag} {digest}"


def _is_users(func: types.FunctionType) -> bool:
    """Whether a function is code of the user's: not Python's, nor of an installed package."""
    module = str(func.__globals__.get("__name__"))
    return "-packages" not in func.__code__.co_filename and not is_neutral(module)


def _parts(value: Any, names: frozenset[str]) -> list[Any]:
    """What a value stores by these names, or gives its calls on to, read without calling it."""
    cls, kind = type_of(value), kind_of(type_of(value))
    found: list[Any] = []
    if cls in (list, tuple, dict):
        found = [*(value.values() if cls is dict else value)][:_MOST]
    elif kind == "holder":
        found = [*stored.held_by(value).values()]
    elif kind == "function":  # of a library, it may pass calls on to what its closure holds
        found = [*_below(value), *stored.cells_of(value).values()]
    elif not is_neutral(owner := value if kind == "class" else cls):
        if issubclass(cls, types.ModuleType):
            spaces, wanted = [vars(value)], names
        else:
            spaces = [own for _, own in stored.classes_of(owner)]
            # What declares fields has an `__init__` that is not in its source.
            begins = "__post_init__" if kind_of(owner) == "fields" else "__init__"
            wanted = names | {*_BY_SYNTAX, begins}
        if owner is cls:
            kept = attributes_of(value)
            spaces = [kept, kept.get("_modules") or {}, *spaces]  # those of torch
        by_name: dict[str, Any] = {}
        for own in reversed(spaces):
            here = {name: own[name] for name in sorted(wanted & own.keys())}
            found += here.values() if "super" in names else ()
            by_name |= here
        found += by_name.values()
    return [part for part in found if kind_of(type_of(part)) != "leaf"]


def _text_of(const: Any) -> str:
    """The text of a constant in code, or of code: the same in every process."""
    if isinstance(const, types.CodeType):
        consts = [*map(_text_of, const.co_consts)]
        return f"{const.co_code.hex()} {consts} {const.co_names}"
    if isinstance(const, tuple | frozenset):
        texts = map(_text_of, const)
        return str([*texts] if isinstance(const, tuple) else sorted(texts))
    return repr(const)
