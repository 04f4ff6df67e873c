"""All kinds of values that dumps hold; a tree of a file as a value, whole or some of its fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlskip.format import batches, plain
from rlskip.format.chunks import CHUNK
from rlskip.format.codec import USER, Into, Kind, Node, Unpacker, add_kind
from rlskip.format.codec import Packer as Packer
from rlskip.format.dump_errors import DumpError, UnknownTypeError, UnreadableDumpError

if TYPE_CHECKING:
    from rlskip.format.container import Reader

_WITH_FIELDS = ("dict", "ordereddict", "defaultdict", "tensordict", "dataproto")

# A class is of the first kind whose test it passes: some of the hosts' are dataclasses, too.
for _kind in (*batches.KINDS, *plain.KINDS):
    add_kind(_kind)


def register_codec(
    type: type, name: str, encode: Callable[[Any], Any], decode: Callable[[Any], Any]
) -> None:
    """Keep values of exactly `type` in dumps, under a name; its subclasses need their own codecs.

    `encode` turns a value into something that dumps already keep (a dict of tensors, a string), and
    `decode` turns that back. Trust its argument as you trust the file. A process that loads the
    dump must have registered the codec, too.

    >>> register_codec(Version, "myproject.Version", str, Version)
    """

    def unpack(unpacker: Unpacker, node: Node) -> Any:
        # A codec gets tensors, whatever else is made.
        reader = Unpacker(unpacker.source, "torch") if unpacker.into == "numpy" else unpacker
        return decode(reader.node(node))

    add_kind(
        Kind(f"{USER}{name}", type, lambda value, packer: [packer.node(encode(value))], unpack)
    )


def rebuild(
    source: Reader, tree: str, fields: Sequence[str] | None = None, into: Into = "host"
) -> Any:
    """The value of one of a file's trees, or with `fields` of its outermost mapping or batch.

    Raises UnknownTypeError for a type that this process does not know, UnreadableDumpError where it
    cannot make the value, which proves nothing about the file, and another DumpError where there is
    no such field, an array is altered, or the value takes more memory than it may.
    """
    where = source.where
    try:
        node = source.index[tree]
        if fields is not None:
            if missing := sorted({*fields} - choosable(node).keys()):
                raise DumpError(f"it has no field {', '.join(map(repr, missing))}", where)
            node = _chosen(node, fields)
        # What is large comes together, but for what a GPU is to hold, which needs no room here.
        if not source.is_small:
            parts = choosable(node).values()
            found = {n for part in parts if (n := array_of(part)) is not None and part[-1] is None}
            source.fetch({number for number in found if source.nbytes(number) > CHUNK})
        return Unpacker(source, into).node(node)
    except UnknownTypeError as error:
        raise UnknownTypeError(error.what, error.where or where, error.remedy) from error
    except (DumpError, OSError):
        raise
    except Exception as error:
        raise UnreadableDumpError.by_process(error, where) from error


def array_of(node: Node) -> int | None:
    """The array that holds a tensor's elements, one after the other; None of any other value."""
    match node:
        case ["tensor", "dense", _, _, int(number), *_]:
            return number
    return None


def length_of(node: Node, nbytes: Callable[[int], int]) -> int | None:
    """How many values a list, an array or a tensor has, none of which is read; None of others."""
    match node:
        case ["list" | "tuple", "any", [*items]]:
            return len(items)
        case ["list" | "tuple", str(), int(number), *_]:
            return nbytes(number) // 8
        case ["tensor", "dense", _, [int(length), *_], *_] | ["ndarray", _, [int(length), *_], _]:
            return length
        case ["tensor", "jagged", _, ["tensor", "dense", _, [int(ends)], *_], *_]:
            return ends - 1
    return None


def is_flat(node: Node) -> bool:
    """Whether a value is known to be one number after the other."""
    match node:
        case ["ndarray", "O", [_], content]:
            return is_flat(content)
        case ["tensor", "dense", _, [_], *_] | ["ndarray", _, [_], _]:
            return True
    return isinstance(node, list) and node[:2] in (["list", "int"], ["list", "float"])


def choosable(node: Node) -> dict[str, Node]:
    """The nodes of the fields that can be chosen of a value, by name; none of any other value."""
    match node:
        case ["dataproto", batch, entries, _]:
            return {**choosable(batch), **choosable(["dict", entries])}
        case [str(tag), *_, entries] if tag in _WITH_FIELDS:
            return {key: value for key, value in entries if type(key) is str}
    return {}


def _chosen(node: Node, fields: Sequence[str]) -> Node:
    """The node of a value with these of its fields only."""
    match node:
        case ["dataproto" as tag, batch, entries, meta_info]:
            _, chosen = _chosen(["dict", entries], fields)
            return [tag, _chosen(batch, fields), chosen, meta_info]
        case [str(tag), *parts, entries] if tag in _WITH_FIELDS:
            return [tag, *parts, [entry for entry in entries if entry[0] in fields]]
    return node
