"""The rule by which a replay finds two values equal, and the plain JSON that shows it.

Two values are equal if and only if their plain JSON is, whatever their length; docs/skip.md states
the rule. A long text, list or mapping is kept as a hash of that JSON: each dump records it.
"""

from __future__ import annotations

import datetime
import enum
import json
import numbers
import os
import re
import uuid
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import attrs
import numpy as np
import xxhash

from rlskip._human import short
from rlskip.batch.columns import is_tensor
from rlskip.format.codec import MAX_DEPTH, Walk
from rlskip.format.dump_errors import UnsupportedTypeError, text_of
from rlskip.format.fingerprint import scalar_of

_LONG = 1 << 12  # characters
_OF_JSON = (str, int, float, bool, type(None), dict, list, tuple)
_LARGEST = 1 << 1024  # a larger one is not a float, and has many digits
_AS_TEXT = (
    numbers.Number, range, slice, re.Pattern, uuid.UUID, datetime.date, datetime.time,
    datetime.timedelta,
)  # fmt: skip
_REMEDY = (
    "give numbers, strings, arrays, or lists and mappings of these; or register a codec for its "
    "type: rlskip.store.register_codec(type, name, encode, decode)"
)


class Marked(str):
    """A text in angle brackets that stands for a value which JSON lacks, such as ``<bytes ...>``.

    A text of the user's that looks like one is marked itself, so that the two are never equal.
    """


def comparable(value: Any, where: str, simplify: Callable[[Any], Any] | None = None) -> Any:
    """`value` as plain JSON that differs for any two values that are not equal.

    Raises UnsupportedTypeError for a part that cannot be compared; `where` is the name of the
    value. `simplify` is called with each part before it is converted: it returns a simpler value,
    or raises what ends the conversion.
    """
    if value is None or type(value) in (bool, float):
        return value  # at once: most are
    return _shortened(_Conversion(simplify).convert(value, where, MAX_DEPTH))


@attrs.frozen(eq=False)
class _Conversion:
    _simplify: Callable[[Any], Any] | None
    _walk: Walk = attrs.field(factory=Walk)

    def convert(self, value: Any, where: str, levels: int) -> Any:
        if self._simplify is not None:  # who gives one tells its own errors
            return self._convert(self._simplify(value), where, levels)
        try:
            return self._convert(value, where, levels)
        except (UnsupportedTypeError, MemoryError):
            raise
        except Exception as error:  # an interpolation that fails, an object that is broken
            what = f"cannot be compared: {text_of(error)}"
            raise UnsupportedTypeError(what, where, _REMEDY) from error

    def _convert(self, value: Any, where: str, levels: int) -> Any:
        value = _simple(scalar_of(value))
        if isinstance(value, str):
            return _text(value)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, float) or (isinstance(value, int) and abs(value) < _LARGEST):
            return float(value) if isinstance(value, float) else int(value)
        if isinstance(value, Set):
            levels -= 1  # it is kept as a list in a mapping
        if self._walk.why_endless(MAX_DEPTH - levels + 1):
            raise UnsupportedTypeError("nested without end", where, _REMEDY)
        if isinstance(value, Mapping):
            keys = {self._key(key, where): key for key in value}
            return {
                k: self.convert(value[keys[k]], f"{where}.{k}", levels - 1) for k in sorted(keys)
            }
        if isinstance(value, Set):
            parts = (self.convert(item, f"{where}{{...}}", levels - 1) for item in value)
            return {"<set>": sorted(parts, key=canonical)}
        if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
            return [self.convert(v, f"{where}[{i}]", levels - 1) for i, v in enumerate(value)]
        return f"<{_sort(value)} {_hash(value, where)}>"

    def _key(self, key: Any, where: str) -> str:
        """A mapping's key as a text; the keys 1 and "1" stay two."""
        key = _simple(scalar_of(self._simplify(key) if self._simplify else key))
        if isinstance(key, str):
            return _text(key)
        if key is None or isinstance(key, bool | int | float):
            kind = "number" if isinstance(key, int | float) else "None"
            return f"<{'bool' if isinstance(key, bool) else kind} {_canonical(key)!r}>"
        return f"<{type(key).__qualname__} {_hash(key, f'{where}.keys()')}>"


def _simple(value: Any) -> Any:
    """A value that has all that it is in a text as that text; any other as it is."""
    kind = type(value)
    if kind in _OF_JSON:  # most are
        return value
    if issubclass(kind, enum.Enum):
        # A member's name outlives its value.
        kept, parts = value._value_, (value._value_,)
        parts = kept if isinstance(kept, tuple) else parts
        kept = kept if all(isinstance(part, bool | int | float | str) for part in parts) else ""
        return Marked(f"<{kind.__qualname__}.{value._name_} {kept!r}>")
    if issubclass(kind, os.PathLike):
        return os.fspath(value)
    if issubclass(kind, re.Pattern):  # its own repr shows 200 characters
        return Marked(f"<pattern {value.pattern!r} {value.flags}>")
    is_number = issubclass(kind, np.generic | int | float)
    return Marked(f"<{value!r}>") if is_text(kind) and not is_number else value


def is_text(cls: type) -> bool:
    """Whether an object of a class has all that it is in its ``repr``."""
    return issubclass(cls, _AS_TEXT) or cls.__name__.lower().endswith("dtype")


def _text(value: str) -> str:
    """As JSON gives it back (a pair of surrogates becomes one character), and no mark."""
    text = str.__str__(value)
    if not text.isascii():
        text = json.loads(json.dumps(text))
    is_marked = text.startswith("<") and text.endswith(">") and not isinstance(value, Marked)
    return f"<str {text}>" if is_marked else text


def _sort(value: Any) -> str:
    """What a value is, for readers: its content is in the hash."""
    if isinstance(value, np.ndarray):
        name = "text" if value.dtype.kind in "SU" else value.dtype.name  # however wide
        return f"{name} {list(value.shape)}"
    if is_tensor(value) and not value.is_nested:
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return "bytes" if isinstance(value, bytearray) else type(value).__qualname__


def _hash(value: Any, where: str) -> str:
    from rlskip.format.fingerprint import fingerprint  # values from meta.json need no torch

    try:
        return fingerprint(value, volatile=())
    except UnsupportedTypeError as error:
        at = error.where.removeprefix("prompts")
        raise UnsupportedTypeError(error.what, f"{where}{at}", _REMEDY) from error


def _shortened(value: Any) -> Any:
    """Plain JSON with a hash of each text, list and mapping that is long."""
    shorter = value
    if isinstance(value, dict):
        shorter = {key: _shortened(part) for key, part in value.items()}
    elif not isinstance(value, str | list):
        return value
    if len(canonical(shorter)) <= _LONG:
        return shorter
    text = canonical(value)
    return f"<{type(value).__name__} of {len(value)}: {xxhash.xxh3_128_hexdigest(text.encode())}>"


def canonical(value: Any) -> str:
    """The text of plain JSON: the same for values that are equal, and for no others."""
    return json.dumps(_canonical(value), sort_keys=True)


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _canonical(part) for key, part in value.items()}
    if isinstance(value, list):
        return [*map(_canonical, value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()
"""Stands for the value of a name that one of two sides does not have."""


def differences(name: str, now: Any, then: Any) -> list[str]:
    """How two plain values differ: a line for each place in their mappings.

    >>> differences("sampling", {"top_p": 1, "n": 2}, {"top_p": 1.0})
    ['sampling.n: 2 now, absent in the dump']
    """
    if isinstance(now, dict) and isinstance(then, dict):
        return [
            line
            for key in sorted({*now, *then})
            for line in differences(f"{name}.{key}", now.get(key, ABSENT), then.get(key, ABSENT))
        ]
    if now is then or (type(now) is type(then) is str and now == then):  # most are
        return []
    if now is not ABSENT and then is not ABSENT and canonical(now) == canonical(then):
        return []
    now, then = repr(now), repr(then)
    # Of long values, show the part that differs.
    alike = next((i for i, (a, b) in enumerate(zip(now, then, strict=False)) if a != b), 0)
    if start := max(0, alike - 20) if max(len(now), len(then)) > 60 else 0:
        now, then = f"...{now[start:]}", f"...{then[start:]}"
    return [f"{name}: {short(now, 60)} now, {short(then, 60)} in the dump"]
