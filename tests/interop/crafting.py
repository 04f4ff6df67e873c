"""Files that pickle and torch write, and pickles that neither would write."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import torch


def saved(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def proto(state: Any) -> bytes:
    """A gen_batch.dp with this state, as export writes it."""
    inner = pickle.dumps(state, protocol=4)
    head = b"\x80\x04cverl.protocol\nDataProto\n)\x81"
    return head + inner[2:-1] + b"b."


class Made:
    """Pickled as ``call(*arguments)``; with keywords as ``call.__new__(call, ...)``."""

    def __init__(self, call: Any, *arguments: Any, **keywords: Any) -> None:
        self.call, self.arguments, self.keywords = call, arguments, keywords

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.arguments


class Stated:
    """Something that is given states, one after the other."""

    def __init__(self, made: Any, *states: Any) -> None:
        self.made, self.states = made, states


class New:
    """An object of a type, before it has a state."""

    def __init__(self, kind: type) -> None:
        self.kind = kind


class Applied:
    """A call with arguments that are not a tuple."""

    def __init__(self, call: Any, arguments: Any) -> None:
        self.parts = call, arguments


class Crafting(pickle._Pickler):  # type: ignore[name-defined]
    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, Made) and obj.keywords:
            for part in (obj.call, obj.arguments, obj.keywords):
                self.save(part)
            self.write(pickle.NEWOBJ_EX)
        elif isinstance(obj, Applied):
            for part in obj.parts:
                self.save(part)
            self.write(pickle.REDUCE)
        elif isinstance(obj, New):
            self.save(obj.kind)
            self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        elif isinstance(obj, Stated):
            self.save(obj.made)
            for state in obj.states:
                self.save(state)
                self.write(pickle.BUILD)
        else:
            super().save(obj, save_persistent_id)


def crafted(value: Any) -> bytes:
    buffer = io.BytesIO()
    Crafting(buffer, 4).dump((None, {"x": value}, {}))
    return b"\x80\x04cverl.protocol\nDataProto\n)\x81" + buffer.getvalue()[2:-1] + b"b."


def dtype(code: str, *state: Any) -> Stated:
    return Stated(Made(np.dtype, code, False, True), state)
