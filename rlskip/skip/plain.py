"""Values as plain JSON, where they are plain data; nothing of the user's runs for that."""

from __future__ import annotations

import contextlib
import enum
import gc
import types
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import datetime
from typing import Any

from omegaconf import DictConfig

from rlskip.batch.tables import loaded
from rlskip.skip import stored
from rlskip.skip.names import IGNORED, shaping_in
from rlskip.skip.stored import in_words, inside, is_array_type, kind_of, type_of

# Larger ones are data, and hashing them would take longer than a look at the dumps.
_MAX_ARRAY = 1 << 16  # bytes
_MAX_PARTS = 1_000_000


class _NotPlain(Exception):
    """A value that is not plain data."""


class _TooLarge(_NotPlain):
    """Only its size keeps it from being plain data."""


def plain_or_not(value: Any, keep: Callable[[Any], Any] | None = None) -> tuple[Any, str, bool]:
    """What to `keep` of a value as plain JSON; or, where it is not plain, what it is.

    And whether only its size keeps it from being plain.
    """
    # At once what most are; a text in brackets is marked, and a long one hashed.
    kind = type(value)
    is_short = kind is str and len(value) < 100 and value[:1] != "<"
    if value is None or kind in (bool, int, float) or is_short:
        return value, "", False
    from rlskip.store.identity import comparable  # needs numpy

    parts = 0

    def simpler(part: Any) -> Any:
        nonlocal parts
        if type(part) in (list, tuple, dict) and (parts := parts + len(part)) > _MAX_PARTS:
            raise _TooLarge("large data")
        return _simpler(part)

    try:
        return comparable(value, "", simpler, keep), "", False
    except _NotPlain as error:
        return None, str(error), isinstance(error, _TooLarge)
    except Exception:  # nested too deep, or an object of the user's raises anything
        return None, f"a {type(value).__qualname__} that cannot be compared", False


def _simpler(value: Any) -> Any:
    """A part as a single value, a small array, or a list or a mapping of parts; else _NotPlain."""
    from rlskip.format.fingerprint import Marked  # needs numpy

    cls = type_of(value)  # isinstance would ask the object for its class
    kind = kind_of(cls)
    if kind == "leaf" and is_array_type(cls):
        if getattr(getattr(value, "device", None), "type", "cpu") != "cpu":
            raise _NotPlain(f"a tensor on {value.device.type}")  # no stage waits for a copy
        if value.shape and value.nbytes > _MAX_ARRAY:
            raise _TooLarge(f"an array of {value.nbytes} bytes")
        return value
    if issubclass(cls, enum.Enum):
        own = {k: v for k, v in stored.attributes_of(value).items() if k[:1] != "_"}
        # Of those only what cannot lead back to the member.
        own = {k: v for k, v in own.items() if is_single(v) and not isinstance(v, enum.Enum)}
        if own or unwrapped(value) is not value:
            name = f"{cls.__qualname__}.{value._name_}"
            return {Marked("<type>"): name, "value": value._value_, **own}
    if issubclass(cls, bytes | bytearray) and len(value) > _MAX_ARRAY:
        raise _NotPlain(in_words(value))
    is_single_or_list = kind == "leaf" or (kind == "list" and not hasattr(cls, "_fields"))
    is_known = kind in ("leaf", "list", "dict", "fields", "config")
    parts = inside(value, kind) if is_known and not is_single_or_list else None
    added = stored.beside(value, kind, parts or {}) if is_known else {}
    added = {k: part for k, part in added.items() if shaping_in({k: 0}) or _holds_shaping(part)}
    if added and kind != "fields":  # as an attribute of a text
        raise _NotPlain(f"{in_words(value)} with {', '.join(added)}")
    if is_single_or_list:
        return value
    if kind == "config" and not issubclass(cls, DictConfig):
        return [*(parts or {}).values()]
    if parts is None and not issubclass(cls, Mapping):
        if issubclass(cls, memoryview) or not issubclass(cls, Sequence | Set):
            raise _NotPlain(in_words(value))
        return value
    # A mapping that is not one of Python's says itself what it has.
    parts = value if parts is None else {**parts, **added}
    if stored.is_whole_config(parts):
        raise _NotPlain("the application's config")
    if any(part is stored.UNREAD for part in parts.values()):
        raise _NotPlain(f"{in_words(value)} that computes a value")
    # Which sample is drawn does not count; which class it is does, where it declares its fields.
    dropped = IGNORED if kind == "fields" else ("seed",)
    parts = {key: part for key, part in parts.items() if type(key) is not str or key not in dropped}
    is_named = kind in ("fields", "list") and not issubclass(cls, stored.NAMESPACES)
    return {Marked("<type>"): stored.kind_name(cls), **parts} if is_named else parts


def _holds_shaping(value: Any) -> bool:
    kind = kind_of(type_of(value))
    return kind in ("dict", "fields", "object") and bool(shaping_in(inside(value, kind) or {}))


def unwrapped(value: Any) -> Any:
    """What a read-only view shows, and what an enum's member holds, if that has parts."""
    if type_of(value) is types.MappingProxyType:
        return gc.get_referents(value)[0]  # any other way calls what it shows
    if issubclass(type_of(value), enum.Enum):
        kept = stored.attributes_of(value).get("_value_")
        return value if kind_of(type_of(kept)) == "leaf" else kept
    return value


def is_single(value: Any) -> bool:
    """Whether a value is a number, a text or the like, which holds no prompts beside others."""
    cls = type_of(value)
    return kind_of(cls) == "leaf" and not (is_array_type(cls) and value.shape)


def is_time(value: Any) -> bool:
    """Whether a value is a time of the clock, such as that at which a trainer started."""
    return type(value) is datetime or (type(value) is float and 1e9 < value < 4e9)


def is_data(value: Any) -> bool:
    """Whether a value that is left out holds data, as an engine or a callable does not."""
    cls = type_of(value)
    kind = kind_of(cls)
    with contextlib.suppress(Exception):  # an object of the user's raises anything
        if kind == "list" or is_array_type(cls) or is_data_proto(value):
            return True
        holders = (Mapping, Sequence, loaded("PIL.Image", "Image"))
        holds = kind == "fields" or (issubclass(cls, holders) and not issubclass(cls, str))
        return holds and not stored.is_whole_config(inside(value, kind))
    return False


def is_data_proto(value: Any) -> bool:
    """Whether a value has the parts of verl's DataProto, which are stored."""
    return {"batch", "non_tensor_batch"} <= stored.attributes_of(value).keys()
