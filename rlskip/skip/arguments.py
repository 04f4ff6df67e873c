"""A stage's arguments besides the prompts: which of them count, as plain data."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import enum
import inspect
import numbers
import os
import re
import types
import uuid
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any

import attrs

from rlskip.config.facts import SHAPING_NAMES

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
_MAX_KEPT = 256  # fields of an object
_DRAW = "seed"
_WHOLE_CONFIG = {"skip", "rlskip", "hydra"}
_OF_ARRAYS = ("dtype", "nbytes", "tolist")
_AS_TEXT = (
    numbers.Number, range, slice, re.Pattern, uuid.UUID, datetime.date, datetime.time,
    datetime.timedelta,
)  # fmt: skip
_NAMESPACES = (types.SimpleNamespace, Namespace)
_KINDS = inspect.Parameter

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
    values
        By name what is compared, as plain JSON. Data that is not compared is in it as
        `NOT_COMPARED`, so that it differs from a default.
    usual
        Names of those that have their default.
    left_out
        Those that are not plain data, by name: what each is. Of their parts only those count that
        shape rollouts by their names (:data:`~rlskip.config.facts.SHAPING_NAMES`).
    large
        Those of them that are left out for their size alone, such as a batch.
    """

    values: dict[str, Any] = attrs.field(factory=dict)
    usual: set[str] = attrs.field(factory=set)
    left_out: dict[str, str] = attrs.field(factory=dict)
    large: list[str] = attrs.field(factory=list)

    @property
    def compared(self) -> list[str]:
        """The names of those whose values are compared."""
        names = self.values.keys() - self.left_out.keys()
        return sorted(name for name in names if not name.endswith(_TYPE))

    @property
    def at_default(self) -> Arguments:
        """Only those that have their default."""
        return Arguments({n: v for n, v in self.values.items() if n in self.usual}, self.usual)

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
        The argument that holds the prompts. Of what is beside them in it that counts which shapes
        rollouts by its name.
    """
    found = Arguments()
    if ALL in ignored:
        return found
    for name, value, default in _each(bound, ignored):
        if name in ignored or name in ("self", "cls"):
            continue
        if name == holder:
            if value is not prompts:
                inside = value if is_data(value) else getattr(value, "__dict__", {})
                _add_parts(found, name, inside)
        elif value is not prompts or is_single(value):
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
    if isinstance(value, (str, bytes, bytearray, enum.Enum, os.PathLike, *_AS_TEXT)):
        return True
    of_array = not isinstance(value, Mapping) and all(hasattr(value, n) for n in _OF_ARRAYS)
    return value is None or (of_array and not getattr(value, "shape", ()))


def plain_entries(values: Mapping[str, Any], without: Collection[str]) -> dict[str, Any]:
    """The entries that are plain data, but those of the names in `without`."""
    found = Arguments()
    for name, value in values.items():
        if name not in without:
            _add(found, str(name), value, _KINDS.empty)
    return {name: found.values[name] for name in found.values.keys() - found.left_out.keys()}


def _add(found: Arguments, name: str, value: Any, default: Any) -> None:
    from rlskip.batch.columns import is_data_proto  # needs numpy
    from rlskip.store.comparable import canonical, comparable  # needs torch

    reading, usual = _Reading(), _Reading()
    try:
        data = reading.read(value)
    except _NotPlain as error:
        found.left_out[name] = str(error)
        if is_data(value):
            if isinstance(error, _TooLarge) or is_data_proto(value):
                found.large.append(name)
            found.add(name, NOT_COMPARED, is_usual=value is default)
        _add_parts(found, name, value)
        return
    is_default = False
    if default is not _KINDS.empty:
        with contextlib.suppress(_NotPlain):
            is_default = canonical(usual.read(default)) == canonical(data)
    found.add(name, data, is_default)
    if reading.types:
        same = is_default and reading.types == usual.types
        found.add(f"{name}{_TYPE}", comparable(sorted(reading.types), name), same)


def _add_parts(found: Arguments, name: str, value: Any) -> None:
    """Add what shapes rollouts in a value that is not compared as a whole."""
    for inner, part in _shaping_parts(value):
        _add(found, f"{name}.{inner}", part, _KINDS.empty)


def _shaping_parts(value: Any, levels: int = 3) -> Iterator[tuple[str, Any]]:
    """By dotted name what shapes rollouts in a value that is not plain as a whole.

    Sampling parameters may hold a callback, say, and still have a temperature.
    """
    fields: Any = None
    with contextlib.suppress(Exception):  # an object of the user's raises anything
        fields = _fields_of(value)
    small = isinstance(fields, Mapping) and len(fields) <= _MAX_KEPT
    if small and _WHOLE_CONFIG.isdisjoint(key for key in fields if isinstance(key, str)):
        for name, part in fields.items():
            if name in SHAPING_NAMES:
                yield name, part
            elif levels and isinstance(name, str):
                yield from ((f"{name}.{i}", p) for i, p in _shaping_parts(part, levels - 1))


def _is_whole_config(fields: Mapping[Any, Any]) -> bool:
    """Whether a mapping is the application's config: it has a node of rlskip's or Hydra's."""
    return any(isinstance(fields.get(key), Mapping) for key in _WHOLE_CONFIG)


def is_data(value: Any) -> bool:
    """Whether a value that is left out holds data, as an engine or a callable does not."""
    from rlskip.batch.columns import is_data_proto
    from rlskip.batch.tables import loaded

    with contextlib.suppress(Exception):  # an object of the user's raises anything
        fields = _fields_of(value)
        if isinstance(fields, Mapping):
            return not _is_whole_config(fields)
        return (
            (isinstance(fields, Sequence | Set) and not isinstance(value, str) and len(fields) > 0)
            or isinstance(fields, bytes | bytearray)
            or isinstance(value, loaded("PIL.Image", "Image"))
            or all(hasattr(value, name) for name in _OF_ARRAYS)
            or is_data_proto(value)
        )
    return False


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
        if isinstance(value, enum.Enum):
            return Marked(f"<{type(value).__qualname__}.{value.name}>")
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        # No mapping is asked: a DictConfig takes long to say that it has no such attribute.
        if not isinstance(value, Mapping) and all(hasattr(value, name) for name in _OF_ARRAYS):
            if not getattr(value, "shape", ()):
                return value.tolist()
            if value.nbytes > _MAX_ARRAY:
                raise _TooLarge(f"an array of {value.nbytes} bytes")
            return value
        if isinstance(value, re.Pattern):  # its own repr shows 200 characters
            return Marked(f"<pattern {value.pattern!r} {value.flags}>")
        if isinstance(value, _AS_TEXT) or type(value).__name__.lower().endswith("dtype"):
            return Marked(f"<{value!r}>")
        if isinstance(value, bytes | bytearray) and len(value) <= _MAX_ARRAY:
            return value
        fields = _fields_of(value)
        named = isinstance(value, tuple) and hasattr(value, "_fields")
        if named or (fields is not value and not isinstance(value, _NAMESPACES)):
            self.types.append(f"{place}: {type(value).__qualname__}".removeprefix(": "))
        if isinstance(fields, Mapping):
            if _is_whole_config(fields):
                raise _NotPlain("the application's config")
            # Which sample is drawn does not count.
            return {key: part for key, part in fields.items() if key != _DRAW}
        is_bytes = isinstance(fields, bytes | bytearray | memoryview)
        if isinstance(fields, Sequence | Set) and not is_bytes:
            return fields
        raise _NotPlain(f"a {type(value).__qualname__}")


def _fields_of(value: Any) -> Any:
    """The fields of an object whose class says which it has, by name; else `value` itself.

    Parameters for sampling often are such objects: dataclasses, attrs' classes, vLLM's
    SamplingParams (msgspec), pydantic's models, transformers' GenerationConfig.
    """
    kind = type(value)
    if isinstance(value, type | Mapping):
        return value
    if isinstance(value, _NAMESPACES):
        return vars(value)
    if dataclasses.is_dataclass(kind):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if attrs.has(kind):
        return {field.name: getattr(value, field.name) for field in attrs.fields(kind)}
    if isinstance(names := getattr(kind, "__struct_fields__", None), tuple):
        return {name: getattr(value, name) for name in names}
    for method in ("model_dump", "to_dict"):
        if callable(getattr(kind, method, None)):
            fields = getattr(value, method)()
            return {name: part for name, part in fields.items() if name != "transformers_version"}
    return value
