"""From values to a tree and arrays, and back: what is kept, is kept exactly.

:class:`Packer` turns a value into a *node*, plain JSON, and a list of arrays that the node names
by number; :class:`Unpacker` rebuilds the value. ``None``, booleans, short integers, finite floats
and strings are nodes as they stand; everything else is ``[tag, ...]`` after its :class:`Kind`.
The kinds of Python are in :mod:`rlskip.store.plain`, those of numpy and torch in
:mod:`rlskip.store.tensors`, those of batches in :mod:`rlskip.store.batches`.

A node is data: rebuilding one imports nothing that it names and calls no class that it names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import attrs
import numpy as np

from rlskip.store.errors import UnknownTypeError, UnsupportedTypeError
from rlskip.store.pieces import Array

Node = Any
_WITH_FIELDS = ("dict", "ordereddict", "defaultdict", "tensordict", "dataproto")
_USER = "user:"
MAX_DEPTH = 100


@attrs.frozen(eq=False)
class Kind:
    """How values of one sort become a node ``[tag, *parts]`` and back.

    ``pack(value, packer)`` returns the parts, ``unpack(parts, unpacker)`` the value.
    """

    tag: str
    pack: Callable[[Any, Packer], list[Node]]
    unpack: Callable[[list[Node], Unpacker], Any]


_BY_TAG: dict[str, Kind] = {}
_BY_TYPE: dict[type, Kind] = {}
_BY_TEST: list[tuple[Callable[[Any], bool], Kind]] = []


def add_kind(
    kind: Kind, types: Iterable[type] = (), test: Callable[[Any], bool] | None = None
) -> None:
    """Use `kind` for exactly these `types`, or for every value that passes `test`."""
    _BY_TAG[kind.tag] = kind
    _BY_TYPE.update(dict.fromkeys(types, kind))
    if test is not None:
        _BY_TEST.append((test, kind))


def register_codec(
    type: type, name: str, encode: Callable[[Any], Any], decode: Callable[[Any], Any]
) -> None:
    """Keep values of exactly `type` in dumps.

    Parameters
    ----------
    type
        The class; its subclasses are others.
    name
        What a dump calls it. It must not change, and the program that loads must have
        registered the same name.
    encode
        From the value to something that dumps keep already (a dict of tensors, a string, ...).
    decode
        Back from that. It receives what a file says: trust it as you trust the file.

    Examples
    --------
    >>> register_codec(Version, "myproject.Version", str, Version)
    """
    add_kind(
        Kind(
            f"{_USER}{name}",
            lambda value, packer: [packer.node(encode(value))],
            lambda parts, unpacker: decode(unpacker.node(parts[0])),
        ),
        types=[type],
    )


# -- the two walks -----------------------------------------------------------------------


class Packer:
    """The walk from a value to a node; ``arrays`` collects what the nodes refer to."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self._path: list[str | tuple[Any]] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []

    def node(self, value: Any, at: str | tuple[Any] = "") -> Node:
        """`value` as a node.

        `at` is its place in the enclosing value, for errors: ``(key,)`` or text such as
        ``.values()``. It is put into words only when there is an error.
        """
        kind = type(value)
        if kind is str or kind is bool or value is None:
            return value
        if kind is float and math.isfinite(value):
            return value
        if kind is int and -(2**63) <= value < 2**63:
            return value
        self._path.append(at)
        if len(self._path) > MAX_DEPTH:
            raise self.unsupported(value, f"nested deeper than {MAX_DEPTH} levels")
        codec = _BY_TYPE.get(kind) or next((k for test, k in _BY_TEST if test(value)), None)
        if codec is None:
            raise self.unsupported(value)
        node = [codec.tag, *codec.pack(value, self)]
        self._path.pop()
        return node

    def array(self, data: np.ndarray, kind: str, owner: Any = None, owned: bool = False) -> int:
        """The number of a 1-D contiguous array.

        The same `owner` given again, say one tensor under two names, is stored once and
        comes back as one. `owned`: the memory is our own copy.
        """
        if owner is not None and id(owner) in self._numbers:
            return self._numbers[id(owner)]
        self.arrays.append(Array.of(data, kind, owned or owner is None))
        if owner is not None:
            self._numbers[id(owner)] = len(self.arrays) - 1
            self._alive.append(owner)  # no other object may take its id meanwhile
        return len(self.arrays) - 1

    def unsupported(self, value: Any, why: str = "") -> UnsupportedTypeError:
        kind = type(value)
        path = (at if isinstance(at, str) else f"[{at[0]!r}]" for at in self._path)
        return UnsupportedTypeError(
            f"cannot keep a {kind.__module__}.{kind.__qualname__}" + (f": {why}" if why else ""),
            where="".join(path),
            remedy="drop it from the result, or teach the store this type: "
            "rlskip.store.register_codec(type, name, encode, decode)",
        )


class _Source(Protocol):
    def array(self, number: int) -> np.ndarray: ...


class Unpacker:
    """The walk back. Nodes come from a file: whatever does not fit raises, unspecifically.

    Parameters
    ----------
    source
        Where the bytes of an array come from.
    fields
        Of the outermost mapping or batch, only these; None for all. Those met are in `found`.
    host_classes
        Whether batches of a host's own class become that; else our stand-in for it.
    """

    def __init__(
        self, source: _Source, fields: Sequence[str] | None = None, host_classes: bool = True
    ) -> None:
        self._source = source
        self.host_classes = host_classes
        self._fields = fields
        self._used: set[int] = set()
        self.found: set[Any] = set()
        self.shared: dict[int, Any] = {}

    def root(self, node: Node) -> Any:
        """The outermost value: the one whose fields may be chosen from."""
        if self._fields is not None and not (type(node) is list and node[0] in _WITH_FIELDS):
            self._fields = None  # nothing to choose from: the caller finds none
        return self.node(node)

    def node(self, node: Node) -> Any:
        if type(node) is not list:
            return node
        tag, *parts = node
        kind = _BY_TAG.get(tag)
        if kind is None and tag.startswith(_USER):
            raise UnknownTypeError(
                f"it holds a value of type {tag.removeprefix(_USER)!r}",
                remedy="register its codec before loading: rlskip.store.register_codec",
            )
        if kind is None:
            raise ValueError(f"there is no kind {tag!r}")
        return kind.unpack(parts, self)

    def chosen(self, *mappings: list[list[Node]]) -> list[list[list[Node]]]:
        """Of mappings that form the outermost value the chosen entries, of others all."""
        wanted, self._fields = self._fields, None
        if wanted is None:
            return list(mappings)
        self.found.update(key for entries in mappings for key, _ in entries if key in wanted)
        return [[entry for entry in entries if entry[0] in wanted] for entries in mappings]

    def entries(self, entries: list[list[Node]]) -> Iterator[tuple[Any, Any]]:
        """The items of a mapping."""
        (chosen,) = self.chosen(entries)
        return ((self.node(key), self.node(value)) for key, value in chosen)

    def array(self, number: int, dtype: str) -> np.ndarray[Any, Any]:
        """Array `number` as elements of `dtype`.

        Once only: what a small file names a thousand times must not become large.
        """
        if number in self._used:
            raise ValueError(f"array {number} is used twice")
        self._used.add(number)
        return self._source.array(number).view(dtype)
