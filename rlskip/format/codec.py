"""Turns values into a tree and arrays, and back, exactly.

:class:`Packer` turns a value into a *node*, plain JSON, and a list of arrays that the node names
by number; :class:`Unpacker` rebuilds the value. ``None``, booleans, short integers, finite floats
and strings are nodes as they are; every other value is ``[tag, *parts]``, which a row of the table
in :mod:`rlskip.format.kinds` writes and reads.

Rebuilding a node imports and calls nothing that it names. What it takes in memory is charged to the
reader's ``max_bytes`` first. Else a tree is believed: who forges one may write any value.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from rlskip.format.chunks import Array
from rlskip.format.dump_errors import UnknownTypeError, UnsupportedTypeError, text_of

if TYPE_CHECKING:
    from rlskip.format.container import Reader

Node = Any
Into = Literal["host", "torch", "numpy"]
"""What a dump becomes: the host's own classes, torch's with stand-ins for the host's, or arrays of
numpy (:mod:`rlskip.format.numpy_maker`), for which torch is not loaded."""
MAX_DEPTH = 100
MAX_PARTS = 1 << 23  # containers and objects in a value
NODE = 1024  # bytes of a rebuilt value besides its arrays and its parts, about
USER = "user:"
_ALL_ITEMS = "return a list of its items: an iterator can be read only once"
_OTHERWISE = (
    "return what it holds as numbers, text, arrays, tensors, or lists, mappings or dataclasses of "
    "these; or drop it from the result; or register a codec for its type: "
    "rlskip.store.register_codec(type, name, encode, decode)"
)
# JSON would read these two code points as one character.
_SURROGATE_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


class Kind(NamedTuple):
    """Values that are written as nodes ``[tag, *parts]``.

    They are of exactly the class `of`, or of one that no kind names and of which the function `of`
    says so. `pack` takes a value and a :class:`Packer`, `unpack` an :class:`Unpacker` and parts.
    """

    tag: str
    of: type | Callable[[type], bool]
    pack: Callable[[Any, Packer], Iterable[Node]]
    unpack: Callable[..., Any]


_BY_TAG: dict[str, Kind] = {}
_BY_CLASS: dict[type, Kind] = {}


def add_kind(kind: Kind) -> None:
    """Write and read values of this kind from now on."""
    _BY_TAG[kind.tag] = kind
    if isinstance(kind.of, type):
        _BY_CLASS[kind.of] = kind


def place_at(path: Iterable[str | tuple[Any]]) -> str:
    """Where a path leads to: by the keys in it, and by what stands for itself (``.values()``)."""
    return "".join(at if isinstance(at, str) else f"[{at[0]!r}]" for at in path)


class Packer:
    """The walk from a value to a node; the nodes refer to `arrays` by number."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self._path: list[str | tuple[Any]] = []
        self._numbers: dict[int, tuple[Any, int | None]] = {}
        self._left = MAX_PARTS

    def node(self, value: Any, at: str | tuple[Any] = "") -> Node:
        """`value` as a node; raises UnsupportedTypeError where a part of it cannot be kept.

        `at` is its place in the enclosing value, for errors: ``(key,)``, or text: ``.values()``.
        """
        kind = type(value)
        if kind is bool or value is None:
            return value
        if kind is str and (value.isascii() or not _SURROGATE_PAIR.search(value)):
            return value
        if kind is float and math.isfinite(value):
            return value
        if kind is int and -(2**63) <= value < 2**63:
            return value
        self._path.append(at)
        if why := self.why_endless(len(self._path)):
            raise self.unsupported(value, why)
        try:
            how = _BY_CLASS.get(kind) or self._find_kind(value)
            node = [how.tag, *how.pack(value, self)]
        except (UnsupportedTypeError, MemoryError):
            raise
        except Exception as error:  # a closed image, a codec's own mistake, an odd __class__
            raise self.unsupported(value, text_of(error)) from error
        self._path.pop()
        return node

    def entries(self, items: Iterable[tuple[Any, Any]]) -> list[list[Node]]:
        """The items of a mapping, each as ``[key node, value node]``."""
        return [[self.node(key, ".keys()"), self.node(value, (key,))] for key, value in items]

    def array(self, data: np.ndarray, spec: str, owned: bool = True) -> int:
        """The number of a 1-D contiguous array; `owned`: no other code changes its memory."""
        self.arrays.append(Array.of(data, spec, owned))
        return len(self.arrays) - 1

    def once(self, value: Any, elements: Callable[[Any], tuple[np.ndarray, str, bool]]) -> Node:
        """The number of the array of an object's `elements`, wherever it is met; None without."""
        if id(value) not in self._numbers:
            data, spec, owned = elements(value)
            # The value is kept, so that no other object takes its id meanwhile.
            self._numbers[id(value)] = value, self.array(data, spec, owned) if len(data) else None
        return self._numbers[id(value)][1]

    def _find_kind(self, value: Any) -> Kind:
        for kind in _BY_TAG.values():
            if not isinstance(kind.of, type) and kind.of(type(value)):
                _BY_CLASS[type(value)] = kind  # the next value of the class needs no test
                return kind
        raise self.unsupported(value)

    def why_endless(self, depth: int) -> str:
        """Why the walk, which meets one more part at this depth, must end; else empty."""
        # Lists that hold one another twice have more parts than can be met.
        self._left -= 1
        if depth > MAX_DEPTH:
            return f"nested deeper than {MAX_DEPTH} levels"
        return f"the whole has more than {MAX_PARTS} parts" if self._left < 0 else ""

    def unsupported(self, value: Any, why: str = "") -> UnsupportedTypeError:
        kind = type(value)
        return UnsupportedTypeError(
            f"cannot keep a {kind.__module__}.{kind.__qualname__}" + (f": {why}" if why else ""),
            where=place_at(self._path),
            remedy=_ALL_ITEMS if hasattr(kind, "__next__") else _OTHERWISE,
        )


def as_key(value: Any) -> Any:
    """A value that has a hash: the values of a mapping, as which fields of a class are read."""
    parts = value.values() if type(value) is dict else value
    return tuple(map(as_key, parts)) if type(value) in (dict, tuple) else value


class Unpacker:
    """The walk from a node to a value; :func:`rlskip.format.kinds.rebuild` names its errors."""

    def __init__(self, source: Reader, into: Into) -> None:
        self.source = source
        self.into = into
        self.charge = source.charge
        self._built: dict[int, Any] = {}

    @functools.cached_property
    def make(self) -> Any:
        """The module that makes tensors and batches of their parts: with torch, or with numpy."""
        name = "numpy_maker" if self.into == "numpy" else "torch_maker"
        return importlib.import_module(f"rlskip.format.{name}")

    def node(self, node: Node) -> Any:
        if type(node) is not list:
            return node
        tag = node[0]
        if tag not in _BY_TAG:
            remedy = "load it with the version of rlskip that wrote it"
            if tag.startswith(USER):
                remedy = "register its codec before loading: rlskip.store.register_codec"
            what = f"it holds a value of the kind {tag.removeprefix(USER)!r}"
            raise UnknownTypeError(f"{what}, which is not known here", remedy=remedy)
        self.charge(NODE)
        return _BY_TAG[tag].unpack(self, *node[1:])

    def list_of(self, node: Node) -> list[Any]:
        """The value of a node that must be a list: others may have a length that costs nothing."""
        value = self.node(node)
        if type(value) is not list:
            raise ValueError("not a list")
        return value

    def entries(self, entries: list[list[Node]]) -> list[tuple[Any, Any]]:
        return [(as_key(self.node(key)), self.node(value)) for key, value in entries]

    def once(self, number: int | None, build: Callable[[np.ndarray], Any]) -> Any:
        """What `build` makes of array `number`, or of none: one object wherever a tree names it."""
        if number is None:
            return build(np.empty(0, np.uint8))
        if number not in self._built:
            self._built[number] = build(self.source.array(number))
        return self._built[number]
