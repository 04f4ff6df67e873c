"""A stage's arguments besides the prompts: which of them count, as plain data."""

from __future__ import annotations

import contextlib
import datetime
import enum
import functools
import inspect
import numbers
import os
import re
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any

import attrs
from omegaconf import DictConfig, ListConfig

from rlskip.skip.stored import (
    NAMESPACES,
    UNREAD,
    attributes_of,
    config_entries,
    declared_fields,
    kind_name,
    type_of,
)

#: Arguments with these names never shape a rollout, so they are not compared.
IGNORED = (
    "step", "steps", "global_step", "global_steps", "current_step", "train_step", "training_step",
    "iteration", "epoch", "batch_idx", "sample_id", "uid", "uids", "request_id", "request_ids",
    "seed", "validate", "timing", "timing_raw", "timeout", "timeout_s", "device", "devices", "rank",
    "local_rank", "world_size", "num_workers", "verbose", "debug", "disable_tqdm", "use_tqdm",
)  # fmt: skip

#: What a batch's `meta_info` holds that shapes no rollout. All else in it is compared.
NEUTRAL_META = (
    *IGNORED, "eos_token_id", "pad_token_id", "recompute_log_prob", "calculate_entropy", "metrics",
    "micro_batch_size", "max_token_len", "use_dynamic_bsz", "dp_size", "global_token_num",
    "is_last_step", "training_phase", "reward_extra_keys",
)  # fmt: skip

#: All names, in ``annotate(ignore=...)``.
ALL = "*"

# Larger ones are data, and hashing them would take longer than a look at the dumps.
_MAX_ARRAY = 1 << 16  # bytes
_MAX_PARTS = 1_000_000
_DRAW = "seed"
_WHOLE_CONFIG = {"skip", "rlskip", "hydra"}
_OF_ARRAYS = ("dtype", "nbytes", "tolist")
_AS_TEXT = (
    numbers.Number, range, slice, re.Pattern, uuid.UUID, datetime.date, datetime.time,
    datetime.timedelta,
)  # fmt: skip
_KINDS = inspect.Parameter
# Fields of these have no class of their own.
_BARE = (*NAMESPACES, Mapping)
SINGLE = (str, bytes, bytearray, enum.Enum, os.PathLike, *_AS_TEXT)

#: Stands for data that is not compared: it equals other such data, and no value.
NOT_COMPARED = "<not compared>"
_TYPE = ".<type>"


class _NotPlain(Exception):
    """A value that is not plain data."""


class _TooLarge(_NotPlain):
    """Plain data that takes too long to compare."""


@attrs.frozen
class Arguments:
    """The arguments of one call that count.

    Parameters
    ----------
    ignored
        Names of arguments that do not count; ``*`` is all names.
    values
        By name what is compared, as plain JSON. Data that is not compared is in it as
        `NOT_COMPARED`, so that it differs from a default.
    usual
        Names of those that have their default.
    opaque
        Those that are not compared as a whole: by name the value, and what it is.
    large
        Those of them that are left out for their size alone, such as a batch.
    attributes
        Those of objects that shape rollouts by their names, compared as well.
    left
        What is neither compared nor known to be neutral: what each is, by name.
    changing
        The names of compared attributes that change while stages run, so that no value is right.
    """

    ignored: Collection[str] = ()
    values: dict[str, Any] = attrs.field(factory=dict)
    usual: set[str] = attrs.field(factory=set)
    opaque: dict[str, tuple[Any, str]] = attrs.field(factory=dict)
    large: list[str] = attrs.field(factory=list)
    attributes: dict[str, Any] = attrs.field(factory=dict)
    left: dict[str, str] = attrs.field(factory=dict)
    changing: list[str] = attrs.field(factory=list)

    @property
    def at_default(self) -> Arguments:
        """Without the arguments that do not have their default."""
        usual = {name: value for name, value in self.values.items() if name in self.usual}
        return attrs.evolve(self, values=usual)

    def add(self, name: str, value: Any, is_usual: bool = False) -> None:
        self.values[name] = value
        if is_usual:
            self.usual.add(name)


def read_arguments(
    bound: inspect.BoundArguments, ignored: Collection[str], prompts: Any, holder: str
) -> Arguments:
    """The arguments that count of a call whose prompts are `prompts`.

    Parameters
    ----------
    ignored
        Names of arguments that do not; ``*`` is all names.
    holder
        The argument that holds the prompts.
    """
    found = Arguments(ignored)
    if ALL in ignored:
        return found
    for name, value, default in _each(bound, ignored):
        if name in ignored or name in ("self", "cls", holder):
            continue
        if value is not prompts or is_single(value):
            _add(found, name, value, default)
    return found


def _each(
    bound: inspect.BoundArguments, ignored: Collection[str]
) -> Iterator[tuple[str, Any, Any]]:
    """Name, value and default of each argument, those in ``**kwargs`` one by one."""
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is _KINDS.VAR_KEYWORD:
            if name not in ignored:
                more = bound.arguments.get(name, {})
                yield from ((key, value, _KINDS.empty) for key, value in more.items())
            continue
        default = () if parameter.kind is _KINDS.VAR_POSITIONAL else parameter.default
        yield name, bound.arguments.get(name, default), default


def is_single(value: Any) -> bool:
    """Whether a value is a number, a text or the like, which holds no prompts beside others."""
    if value is None or issubclass(type(value), SINGLE):
        return True
    return is_array(value) and not getattr(value, "shape", ())


def is_array(value: Any) -> bool:
    """Whether a value is an array or a tensor, by its class: an object is not asked."""
    return is_array_type(type_of(value))


@functools.lru_cache(1 << 12)
def is_array_type(kind: type) -> bool:
    return not issubclass(kind, Mapping) and all(hasattr(kind, name) for name in _OF_ARRAYS)


def plain_entries(values: Mapping[str, Any], without: Collection[str]) -> dict[str, Any]:
    """The entries that are plain data, but those of the names in `without`."""
    found = Arguments()
    for name, value in values.items():
        if name not in without:
            _add(found, str(name), value, _KINDS.empty)
    return {name: found.values[name] for name in found.values.keys() - found.opaque.keys()}


def _add(found: Arguments, name: str, value: Any, default: Any) -> None:
    from rlskip.store.comparable import canonical, comparable  # needs torch

    reading, usual = _Reading(), _Reading()
    try:
        data = reading.read(value)
    except _NotPlain as error:
        found.opaque[name] = value, str(error)
        if is_data(value):
            if isinstance(error, _TooLarge) or _is_data_proto(value):
                found.large.append(name)
            found.add(name, NOT_COMPARED, is_usual=value is default)
        return
    is_default = False
    if default is not _KINDS.empty:
        with contextlib.suppress(_NotPlain):
            is_default = canonical(usual.read(default)) == canonical(data)
    found.add(name, data, is_default)
    if reading.types:
        same = is_default and reading.types == usual.types
        found.add(f"{name}{_TYPE}", comparable(sorted(reading.types), name), same)


def part_of(value: Any) -> tuple[Any, str]:
    """A part of an object as plain JSON; or what it is, where it is not plain."""
    if type(value) in (bool, float) and value == value:  # the most, and the quickest
        return value, ""
    try:
        return _Reading().read(value), ""
    except _NotPlain as error:
        return None, str(error)


def is_whole_config(fields: Any) -> bool:
    """Whether a value is the application's config: it has a node of rlskip's or Hydra's."""
    if not issubclass(type(fields), dict):
        return False
    return any(issubclass(type(fields.get(key)), Mapping) for key in _WHOLE_CONFIG)


def is_data(value: Any) -> bool:
    """Whether a value that is left out holds data, as an engine or a callable does not."""
    from rlskip.batch.tables import loaded

    with contextlib.suppress(Exception):  # an object of the user's raises anything
        fields = _fields_of(value)
        if issubclass(type(fields), Mapping):
            return not is_whole_config(fields)
        kind = type(value)
        return (
            (issubclass(kind, Sequence | Set) and not issubclass(kind, str) and len(value) > 0)
            or issubclass(kind, bytes | bytearray)
            or issubclass(kind, loaded("PIL.Image", "Image"))
            or is_array(value)
            or _is_data_proto(value)
        )
    return False


def _is_data_proto(value: Any) -> bool:
    """Whether a value has the parts of verl's DataProto, which are stored."""
    return {"batch", "non_tensor_batch"} <= attributes_of(value).keys()


@attrs.define
class _Reading:
    """A value on its way to plain data.

    Parameters
    ----------
    parts
        How many it has so far.
    types
        The classes of objects with fields, each after its place: the plain data does not show them.
    """

    parts: int = 0
    types: list[str] = attrs.field(factory=list)

    def read(self, value: Any) -> Any:
        """`value` as plain JSON; raises _NotPlain."""
        from rlskip.store.comparable import comparable  # needs torch

        try:
            return comparable(value, "", self._simpler)
        except _NotPlain:
            raise
        except Exception as error:  # nested too deep, or an object of the user's raises anything
            raise _NotPlain(f"a {type(value).__qualname__} that cannot be compared") from error

    def _simpler(self, value: Any, place: str) -> Any:
        """A part as a number, a text, a small array, or a list or a mapping of parts.

        Raises
        ------
        _NotPlain
            It is something else.
        """
        from rlskip.store.comparable import Marked

        self.parts += 1
        if self.parts > _MAX_PARTS:
            raise _TooLarge("large data")
        kind = type(value)  # isinstance would ask the object for its class
        if issubclass(kind, enum.Enum):
            # A member's name outlives its value.
            kept = value._value_ if isinstance(value._value_, bool | int | float | str) else ""
            return Marked(f"<{kind.__qualname__}.{value._name_} {kept!r}>")
        if value is None or issubclass(kind, bool | int | float | str):
            return value
        if issubclass(kind, os.PathLike):
            return os.fspath(value)
        if is_array(value):
            if getattr(getattr(value, "device", None), "type", "cpu") != "cpu":
                raise _NotPlain(f"a tensor on {value.device.type}")  # no stage waits for a copy
            if not getattr(value, "shape", ()):
                return value.tolist()
            if value.nbytes > _MAX_ARRAY:
                raise _TooLarge(f"an array of {value.nbytes} bytes")
            return value
        if issubclass(kind, re.Pattern):  # its own repr shows 200 characters
            return Marked(f"<pattern {value.pattern!r} {value.flags}>")
        if issubclass(kind, _AS_TEXT) or kind.__name__.lower().endswith("dtype"):
            return Marked(f"<{value!r}>")
        if issubclass(kind, bytes | bytearray) and len(value) <= _MAX_ARRAY:
            return value
        fields = _fields_of(value)
        named = issubclass(kind, tuple) and hasattr(kind, "_fields")
        if named or (type(fields) is dict and not issubclass(kind, _BARE)):
            self.types.append(f"{place}: {kind_name(kind)}".removeprefix(": "))
        if issubclass(type(fields), Mapping):
            if is_whole_config(fields):
                raise _NotPlain("the application's config")
            if any(part is UNREAD for part in fields.values()):
                raise _NotPlain(f"a {kind.__qualname__} that computes a value")
            # Which sample is drawn does not count.
            return {key: part for key, part in fields.items() if key != _DRAW}
        is_bytes = issubclass(kind, bytes | bytearray | memoryview)
        if issubclass(type(fields), Sequence | Set) and not is_bytes:
            return fields
        raise _NotPlain(f"a {kind.__qualname__}")


def _fields_of(value: Any) -> Any:
    """The fields of an object whose class says which it has, by name; else `value` itself."""
    kind = type(value)
    if issubclass(kind, DictConfig | ListConfig):
        entries = config_entries(value)
        return entries if issubclass(kind, DictConfig) else [*entries.values()]
    if issubclass(kind, type | Mapping):
        return value
    fields = declared_fields(value)
    return value if fields is None else fields
