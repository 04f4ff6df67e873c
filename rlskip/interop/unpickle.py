"""Parses a pickle of rollouts without calling what it names.

A pickle names types and functions, and calls them with arguments of its choice. This unpickler
knows the names that dumps of rollouts need, and makes a :class:`Pickled` of each call: a record,
from which :mod:`rlskip.interop.rebuild` makes the value. Any other name ends the reading.

torch's weights-only unpickler reads protocol 2 alone, so none of verl's ``gen_batch.dp``, which
have protocol 4. It also trusts the sizes that a file gives for tensors, and numpy's own
``__setstate__``.
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import attrs

from rlskip.format.torch_maker import TORCH_DTYPES
from rlskip.interop.bounds import Budget, ForeignDumpError

_Python: Any = pickle._Unpickler  # the one in C fills a table of any size that a file asks for
_UNSET = object()
_ITEM = 128
"""Bytes of an item of a set or a mapping."""


@attrs.frozen(eq=False)
class Name:
    """A type or a function that a pickle names."""

    name: str


@attrs.define(eq=False)
class Pickled:
    """A call of the function `name`, or a new object of the type `name`, and its state."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = _UNSET


def _encoded(text: str, encoding: str) -> bytes:
    """How numpy and protocol 2 write bytes; any other encoding would import a codec."""
    if encoding != "latin1":
        raise ForeignDumpError(f"text in the encoding {encoding!r}")
    return text.encode("latin1")


def _bytearray(data: Any = b"", encoding: str = "latin-1") -> bytearray:
    data = data.encode("latin-1") if isinstance(data, str) and encoding == "latin-1" else data
    if not isinstance(data, bytes):
        raise ForeignDumpError(f"bytes made from a {type(data).__name__}")
    return bytearray(data)


def _collection(kind: Any) -> Callable[..., Any]:
    def make(items: Any = ()) -> Any:
        if not isinstance(items, list | tuple):
            raise ForeignDumpError(f"a {kind.__name__} made from a {type(items).__name__}")
        check_keys(items)
        return kind(items)

    return make


def _ordered(pairs: Any = ()) -> Any:
    check_keys(key for key, _ in pairs)
    return collections.OrderedDict([(key, value) for key, value in pairs])


def _defaultdict(factory: Name | None = None) -> Any:
    return collections.defaultdict(None if factory is None else _FACTORIES[factory.name])


_FACTORIES = {f"builtins.{kind.__name__}": kind for kind in (list, dict, set, int, float, str)}
_PLAIN: dict[str, Callable[..., Any]] = {
    "_codecs.encode": _encoded,
    "builtins.set": _collection(set),
    "builtins.frozenset": _collection(frozenset),
    "builtins.bytes": lambda: b"",
    "builtins.bytearray": _bytearray,
    "builtins.complex": lambda real, imaginary: complex(float(real), float(imaginary)),
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": _defaultdict,
}
"""What is made at once: values of Python that are no larger than their parts."""

# Modules under the names of older versions.
_RENAMED = {
    "__builtin__": "builtins",
    "numpy.core.multiarray": "numpy._core.multiarray",
    "numpy.core.numeric": "numpy._core.numeric",
}
_PROTOCOLS_0_AND_1 = (
    pickle.INST, pickle.OBJ, pickle.DICT, pickle.LIST, pickle.PERSID, pickle.NEWOBJ_EX,
    pickle.EXT1, pickle.EXT2, pickle.EXT4,
)  # fmt: skip


def check_keys(keys: Iterable[Any]) -> None:
    """Refuse keys of dicts and sets that could be made to have equal hashes."""
    for key in keys:
        small = isinstance(key, int) and abs(key) < (1 << 61) - 1
        if key is not None and not small and not isinstance(key, str | bytes | Pickled):
            raise ForeignDumpError(f"a key of type {type(key).__name__}")


class Unpickler(_Python):  # type: ignore[misc]
    """Python's unpickler; calls become records.

    Parameters
    ----------
    file
        The pickle, in memory: a length in it must allocate nothing.
    names
        The names that it may use besides those of plain values.
    budget
        Is charged for the values that are made at once: each may be a copy of one argument.
    storage
        Finds the storage that an archive of torch refers to.
    """

    def __init__(
        self,
        file: io.BytesIO,
        names: Iterable[str],
        budget: Budget,
        storage: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(file)
        self._budget = budget
        self._names = {*names, *_PLAIN, *_FACTORIES}
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        full = f"{_RENAMED.get(module, module)}.{name}"
        if module == "torch" and name in TORCH_DTYPES:
            return TORCH_DTYPES[name]
        if full not in self._names:
            raise ForeignDumpError(
                f"it names {full}, which no dump of rollouts needs: nothing of it was run",
                remedy="if you wrote this file yourself, drop that field and dump again",
            )
        return Name(full)

    def persistent_load(self, pid: Any) -> Any:
        if self._storage is None:
            raise ForeignDumpError("a reference to a storage outside an archive of torch")
        return self._storage(pid)

    def load_call(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if type(name) is not Name or type(arguments) is not tuple:
            raise ForeignDumpError(f"a call of a {type(name).__name__}")
        make = _PLAIN.get(name.name)
        if make is None:
            self.append(Pickled(name.name, arguments))
            return
        for one in arguments:
            if isinstance(one, str | bytes | list | tuple):
                self._budget.spend(len(one) * (1 if isinstance(one, str | bytes) else _ITEM))
        self.append(make(*arguments))

    def load_build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) is not Pickled or made.state is not _UNSET:
            raise ForeignDumpError(f"a state for a {type(made).__name__}, or a second one")
        made.state = state

    def load_setitem(self) -> None:
        check_keys(self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        check_keys(self.stack[::2])
        super().load_setitems()

    def load_additems(self) -> None:
        check_keys(self.stack)
        super().load_additems()

    def load_frozenset(self) -> None:
        check_keys(self.stack)
        super().load_frozenset()

    def load_bytearray8(self) -> None:
        self.append(bytearray(self.read(int.from_bytes(self.read(8), "little"))))

    dispatch: ClassVar[dict[int, Any]] = {
        **{
            code: load
            for code, load in _Python.dispatch.items()
            if bytes([code]) not in _PROTOCOLS_0_AND_1
        },
        pickle.REDUCE[0]: load_call,
        pickle.NEWOBJ[0]: load_call,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.ADDITEMS[0]: load_additems,
        pickle.FROZENSET[0]: load_frozenset,
        pickle.BYTEARRAY8[0]: load_bytearray8,
    }
