"""The unpacker, for whoever wants tensors or numpy's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from rlskip.format import arrays, batches, objects, plain  # noqa: F401 - each registers its kinds
from rlskip.format.codec import WITH_FIELDS, Node, Unpacker

if TYPE_CHECKING:
    from rlskip.format.container import Reader

Into = Literal["host", "torch", "numpy"]
"""What a dump is loaded into: the host's own classes, torch's with stand-ins for the host's, or
arrays of numpy (:mod:`rlskip.format.numpy_maker`), for which torch is not loaded."""


def unpacker(source: Reader, fields: Sequence[str] | None = None, into: Into = "host") -> Unpacker:
    """An unpacker of the file `source`.

    Parameters
    ----------
    fields
        The fields of the outermost mapping or batch to rebuild; None for all.
    into
        What is made of tensors and batches.
    """
    if into == "numpy":
        from rlskip.format.numpy_maker import NumpyMaker

        return Unpacker(source, fields, NumpyMaker())
    from rlskip.format.torch_maker import TorchMaker

    return Unpacker(source, fields, TorchMaker(host_classes=into == "host"))


def array_of(node: Node) -> int | None:
    """The array that holds a tensor's elements, one after the other; None of any other value."""
    match node:
        case ["tensor", "dense", _, _, int(number), *_]:
            return number
    return None


def choosable(node: Node) -> dict[str, Node]:
    """The nodes of the fields that can be chosen of a value, by name; none of any other value."""
    if type(node) is not list or node[0] not in WITH_FIELDS:
        return {}
    within, entries = {}, node[-1]
    if node[0] == "dataproto":
        _, batch, entries, _ = node
        within = choosable(batch)
    return {**within, **{key: value for key, value in entries if type(key) is str}}
